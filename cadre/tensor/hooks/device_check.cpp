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
               "CPU, or train it on its device with DistributedDataParallel and an optimizer "
               "of torch::optim",
               what, named.name, named.tensor.device().str()));
  }
}

void check_devices(std::string_view what, std::span<const NamedTensor> tensors,
                   std::optional<c10::Device> of_group) {
  const NamedTensor* first = nullptr;
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || named.tensor.is_meta()) continue;
    const c10::Device device = named.tensor.device();
    if (!device.is_cpu() && device != of_group) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("{}: \"{}\" is on {}, but this rank's device in the group is {}; move the module "
                 "there, or initialize the group with InitOptions::device",
                 what, named.name, device.str(), of_group ? of_group->str() : "the CPU"));
    }
    if (first == nullptr) first = &named;
    if (device == first->tensor.device()) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: \"{}\" is on {} and \"{}\" on {}; move the module to one device with "
                       "module->to(device)",
                       what, first->name, first->tensor.device().str(), named.name, device.str()));
  }
}

}  // namespace cadre::wrap
