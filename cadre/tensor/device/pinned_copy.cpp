#include "cadre/tensor/device/pinned_copy.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "cadre/core/base/error.h"
#include "cadre/tensor/device/device_runtime.h"

namespace cadre::device {

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
