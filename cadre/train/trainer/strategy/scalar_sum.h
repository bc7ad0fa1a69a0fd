// The sum of scalars that a model computes, such as its losses. Scalars of a device are added
// there, and the host waits once, when it needs the sum.
//
// Threads: one. Blocking: value(), until the device has computed the sum; begin_copy() long before
// it makes the wait short. Errors: kTimeout if the device has not come to it within
// kDefaultOperationTimeout; c10::Error for what the driver reports.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cadre/core/os/system.h"
#include "cadre/tensor/device/stream_point.h"

namespace cadre::train {

class ScalarSum {
 public:
  explicit ScalarSum(double value = 0) : on_host_(value) {}

  // Adds `weight` times a tensor of one element. Both are float64 in the product and in the sum.
  void add(const at::Tensor& value, double weight = 1);
  // Enqueues the copy to the host on the current stream of the device. The sum is complete.
  void begin_copy();
  double value(os::System& system);

 private:
  double on_host_;
  at::Tensor on_device_;  // shape (), float64; undefined if all values were on the CPU
  at::Tensor pinned_;     // the copy of on_device_; undefined before begin_copy()
  std::optional<device::StreamPoint> end_of_copy_;
};

}  // namespace cadre::train
