// A Waiter on a futex.
//
// Threads: park() from one thread, unpark() from any. Blocking: park(), until its Deadline.
#pragma once

#include <atomic>
#include <cstdint>

#include "cadre/core/os/system.h"

namespace cadre::os {

class NativeWaiter final : public Waiter {
 public:
  bool park(Deadline deadline) override;
  void unpark() override;

 private:
  std::atomic<uint32_t> is_unparked_{0};
};

}  // namespace cadre::os
