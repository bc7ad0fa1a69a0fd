#include "cadre/tensor/group/beside.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <memory>

#include "cadre/tensor/group/file_memory.h"

namespace cadre {
namespace {

// Returns zeros with the tensor's sizes and, if it has no gaps between elements, its strides.
at::Tensor zeros_as(FileMemory& memory, const at::Tensor& tensor) {
  const at::Tensor flat = memory.zeros(tensor.numel(), tensor.scalar_type());
  if (!tensor.is_non_overlapping_and_dense()) return flat.view(tensor.sizes());
  return flat.as_strided(tensor.sizes(), tensor.strides());
}

}  // namespace

at::Tensor zeros_beside(const at::Tensor& tensor) {
  const std::shared_ptr<FileMemory> memory = FileMemory::of(tensor);
  const at::NoGradGuard no_grad;
  return memory ? zeros_as(*memory, tensor) : at::zeros_like(tensor);
}

at::Tensor moved_beside(const at::Tensor& place, const at::Tensor& tensor) {
  const std::shared_ptr<FileMemory> memory = FileMemory::of(place);
  if (!memory || !tensor.defined() || FileMemory::of(tensor) == memory) return tensor;
  const at::NoGradGuard no_grad;
  return zeros_as(*memory, tensor).copy_(tensor);
}

}  // namespace cadre
