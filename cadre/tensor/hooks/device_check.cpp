#include "cadre/tensor/hooks/device_check.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::wrap {

void refuse_devices(std::string_view what, std::span<const NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || named.tensor.is_cpu() || named.tensor.is_meta()) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        format("{}: \"{}\" is on {}, and this works on the CPU only; move the module to the "
               "CPU, or train it on its device with DistributedDataParallel, "
               "ZeroRedundancyOptimizer or FullyShardedDataParallel",
               what, named.name, named.tensor.device().str()));
  }
}

std::optional<std::string> beyond_reach(const ProcessGroup& group,
                                        std::span<const NamedTensor> tensors) {
  const std::optional<c10::Device> of_group = group.device();
  for (const NamedTensor& named : tensors) {
    const c10::Device device = named.tensor.device();
    if (device.is_cpu() || device.is_meta() || device == of_group) continue;
    return format(
        "\"{}\" is on {}, but this rank's device in the group is {}; move the module there, or "
        "initialize the group with InitOptions::device",
        named.name, device.str(), of_group ? of_group->str() : "the CPU");
  }
  return std::nullopt;
}

std::optional<std::string> not_on_one_device(std::span<const NamedTensor> tensors) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& named : tensors) {
    if (named.tensor.is_meta()) continue;
    if (first == nullptr) first = &named;
    if (named.tensor.device() == first->tensor.device()) continue;
    return format(
        "\"{}\" is on {} and \"{}\" on {}; move the module to one device with "
        "module->to(device), or wrap its parts",
        first->name, first->tensor.device().str(), named.name, named.tensor.device().str());
  }
  return std::nullopt;
}

}  // namespace cadre::wrap
