// Copies in pinned memory of the host, from and to which a device copies without making the host
// wait.
//
// Threads: any. Blocking: uses_pinned_memory(), as find_devices(); pinned_copy(), while the host
// copies, and while the driver pins memory that libtorch's allocator does not have yet. Lifetime:
// the memory of a copy may be freed while a device still reads it by copy_(): the allocator waits
// with its reuse. Errors: kUnavailable if the devices were searched for too late; c10::Error for
// what the driver reports. Source: pin_memory of torch.utils.data.DataLoader.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre::device {

// Says whether pinned memory is of use: whether this process has a CUDA device, or one that the
// program has registered with libtorch as PrivateUse1.
bool uses_pinned_memory();

// Returns the tensor in pinned memory. Returns the tensor itself if it is undefined, has no
// elements, or is not dense or not on the CPU. REQUIRES: uses_pinned_memory().
at::Tensor pinned_copy(const at::Tensor& tensor);

}  // namespace cadre::device
