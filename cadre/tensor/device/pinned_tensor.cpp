#include "cadre/tensor/device/pinned_tensor.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Storage.h>

#include <algorithm>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/device/device_runtime.h"

namespace cadre::device {

at::Tensor empty_pinned(c10::DeviceType type, at::IntArrayRef sizes, at::ScalarType dtype) {
  at::HostAllocator* const allocator = at::getHostAllocator(type);
  if (allocator == nullptr) {
    throw Error(ErrorCode::kUnavailable,
                format("devices of type {} have no pinned memory of the host; copy the tensor to "
                       "the CPU with cpu()",
                       c10::DeviceTypeName(type, /*lower_case=*/true)));
  }
  const c10::InferenceMode no_inference(false);
  const int64_t numel = c10::multiply_integers(sizes);
  const auto num_bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  // The storage owns what the allocator has returned, so that the allocator sees which copies use
  // it.
  const c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes,
                             allocator->allocate(std::max<size_t>(num_bytes, 1)),
                             /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::TensorOptions().dtype(dtype))
      .set_(storage, 0, {numel}, {1})
      .view(sizes);
}

bool uses_pinned_memory() {
  const FoundDevices cuda = find_devices(at::kCUDA);
  if (cuda.was_late) throw Error(ErrorCode::kUnavailable, cuda.reason);
  return cuda.runtime || at::accelerator::getAccelerator() == at::kPrivateUse1;
}

at::Tensor pinned_copy(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_cpu()) return tensor;
  if (tensor.layout() != at::kStrided) return tensor;
  const at::NoGradGuard no_grad;
  return at::empty(tensor.sizes(), tensor.options().pinned_memory(true)).copy_(tensor);
}

}  // namespace cadre::device
