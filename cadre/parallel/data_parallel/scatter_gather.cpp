#include "cadre/parallel/data_parallel/scatter_gather.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/stack.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::data_parallel {

std::vector<at::Tensor> scatter(const at::Tensor& input, std::span<const c10::Device> devices,
                                int64_t dim) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument, "data_parallel::scatter: " + what);
  };
  if (devices.empty()) refuse("there is no device; pass at least one");
  if (!input.defined()) refuse("the tensor is undefined");
  if (dim < 0 || dim >= input.dim()) {
    refuse(format("the dimension is {} and the tensor has {} dimensions; pass one from 0 to {}",
                  dim, input.dim(), input.dim() - 1));
  }
  if (input.size(dim) == 0) return {input.to(devices.front())};
  std::vector<at::Tensor> parts = at::chunk(input, static_cast<int64_t>(devices.size()), dim);
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = parts[i].to(devices[i]);
  return parts;
}

at::Tensor gather(std::span<const at::Tensor> outputs, c10::Device device, int64_t dim) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::kInvalidArgument, "data_parallel::gather: " + what);
  };
  if (outputs.empty()) refuse("there is no output; pass at least one");
  std::vector<at::Tensor> moved;
  for (const at::Tensor& output : outputs) {
    if (!output.defined()) refuse(format("output {} is undefined", moved.size()));
    if ((output.dim() == 0) != (outputs.front().dim() == 0)) {
      refuse(format("output 0 has {} dimensions and output {} has {}", outputs.front().dim(),
                    moved.size(), output.dim()));
    }
    moved.push_back(output.to(device));
  }
  return outputs.front().dim() == 0 ? at::stack(moved) : at::cat(moved, dim);
}

}  // namespace cadre::data_parallel
