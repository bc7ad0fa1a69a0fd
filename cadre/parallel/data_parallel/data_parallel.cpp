#include "cadre/parallel/data_parallel/data_parallel.h"

#include <torch/nn/module.h>

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::data_parallel {
namespace {

constexpr int kMaxReplicas = 1024;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "DataParallel: " + what);
}

c10::Device device_of(const torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) return parameter.device();
  for (const at::Tensor& buffer : module.buffers()) return buffer.device();
  return c10::Device(at::kCPU);
}

}  // namespace

std::vector<c10::Device> devices_of(const torch::nn::Module* module,
                                    const DataParallelOptions& options) {
  if (module == nullptr) refuse("the module is null");
  if (options.dim < 0) refuse(format("the dimension is {}; pass one from 0 on", options.dim));
  const int count =
      options.num_replicas == 0 ? static_cast<int>(options.devices.size()) : options.num_replicas;
  if (count < 1 || count > kMaxReplicas) {
    refuse(format("the number of replicas is {}; name devices, or pass num_replicas from 1 to {}",
                  count, kMaxReplicas));
  }
  if (options.devices.empty()) {
    return std::vector<c10::Device>(static_cast<size_t>(count), device_of(*module));
  }
  if (static_cast<size_t>(count) != options.devices.size()) {
    refuse(format("there are {} devices and num_replicas is {}; leave one of them out",
                  options.devices.size(), count));
  }
  return options.devices;
}

size_t count_parts(std::span<const at::Tensor> inputs, size_t num_devices, int64_t dim) {
  if (inputs.empty())
    refuse("forward() needs a tensor among its arguments, whose rows are divided");
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) refuse(format("tensor {} among the arguments is undefined", i));
    if (dim >= inputs[i].dim()) {
      refuse(
          format("tensor {} among the arguments has {} dimensions, and rows are divided along "
                 "dimension {}; expand it, or keep it in the module",
                 i, inputs[i].dim(), dim));
    }
    if (inputs[i].size(dim) == inputs[0].size(dim)) continue;
    refuse(format("tensor {} among the arguments has {} rows and tensor 0 has {}", i,
                  inputs[i].size(dim), inputs[0].size(dim)));
  }
  const auto num_rows = static_cast<size_t>(inputs[0].size(dim));
  if (num_rows == 0) return 1;
  const size_t rows_of_part = (num_rows + num_devices - 1) / num_devices;
  return (num_rows + rows_of_part - 1) / rows_of_part;
}

}  // namespace cadre::data_parallel
