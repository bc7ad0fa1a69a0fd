// Tensors in pinned memory of the host, from which and to which a device copies without blocking
// the host.
//
// Threads: any. Blocking: never for the device; the driver may take a millisecond for memory that
// the allocator has to make. Lifetime: the memory may be freed while a copy_() with non_blocking
// uses it, because the allocator waits for the copy. Errors: kUnavailable for a type of device that
// has no pinned memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

namespace cadre::device {

// Returns an uninitialized contiguous tensor. It is no inference tensor, whatever the caller's
// mode.
at::Tensor empty_pinned(c10::DeviceType type, at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace cadre::device
