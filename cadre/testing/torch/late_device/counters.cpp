#include "cadre/testing/torch/late_device/counters.h"

namespace cadre::testing::late {

uint64_t Counts::num_synchronous() const {
  uint64_t sum = 0;
  for (const auto& [name, count] : synchronous) sum += count;
  return sum;
}

void Counters::add_kernel(int device) {
  const std::lock_guard lock(mutex_);
  ++counts_.at(static_cast<size_t>(device)).kernels;
}

void Counters::add_wait(int device) {
  const std::lock_guard lock(mutex_);
  ++counts_.at(static_cast<size_t>(device)).waits;
}

void Counters::add_synchronous(int device, const std::string& name) {
  const std::lock_guard lock(mutex_);
  ++counts_.at(static_cast<size_t>(device)).synchronous[name];
}

Counts Counters::counts(int device) const {
  const std::lock_guard lock(mutex_);
  return counts_.at(static_cast<size_t>(device));
}

}  // namespace cadre::testing::late
