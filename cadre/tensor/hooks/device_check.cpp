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

}  // namespace cadre::wrap
