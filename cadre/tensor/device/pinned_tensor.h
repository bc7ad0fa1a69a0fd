// Tensors in pinned memory of the host, from and to which a device copies without making the host
// wait.
//
// Threads: any. Blocking: never for the device; while the driver pins memory that libtorch's
// allocator does not have yet (about a millisecond), pinned_copy() while the host copies, and
// uses_pinned_memory() as find_devices(). Lifetime: the memory may be freed while a copy_() with
// non_blocking uses it, because the allocator waits for the copy. Errors: kUnavailable for a type
// of device that has no pinned memory, or if the devices were searched for too late; c10::Error for
// what the driver reports. Source: pin_memory of torch.utils.data.DataLoader.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace cadre::device {

// Returns an uninitialized contiguous tensor. It is no inference tensor, whatever the caller's
// mode.
at::Tensor empty_pinned(c10::DeviceType type, at::IntArrayRef sizes, at::ScalarType dtype);

// Says whether pinned memory is of use: whether this process has a CUDA device, or one that the
// program has registered with libtorch as PrivateUse1.
bool uses_pinned_memory();

// Returns the tensor in pinned memory. Returns the tensor itself if it is undefined, has no
// elements, or is not dense or not on the CPU. REQUIRES: uses_pinned_memory().
at::Tensor pinned_copy(const at::Tensor& tensor);

}  // namespace cadre::device
