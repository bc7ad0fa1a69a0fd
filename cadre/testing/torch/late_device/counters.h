// Counts what each late device did.
//
// Threads: any.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace cadre::testing::late {

// The late devices have the indices 0 to kNumDevices - 1.
inline constexpr int kNumDevices = 8;

struct Counts {
  uint64_t kernels = 0;  // kernels and copies that were enqueued
  uint64_t waits = 0;    // calls in which the host waited for a stream, an event or the device
  // Operations whose result or shape the host waited for, by name: "aten::nonzero", "copy to host".
  std::map<std::string, uint64_t> synchronous;

  uint64_t num_synchronous() const;
};

class Counters {
 public:
  void add_kernel(int device);
  void add_wait(int device);
  void add_synchronous(int device, const std::string& name);
  Counts counts(int device) const;

 private:
  mutable std::mutex mutex_;
  std::array<Counts, kNumDevices> counts_;
};

}  // namespace cadre::testing::late
