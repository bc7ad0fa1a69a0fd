// A flag that ends every wait of a group: raised by whoever finds a failure, read by every wait.
//
// Threads: raise() and is_raised() from any thread. Blocking: never.
// Lifetime: outlives the transports and engines that were given it.
#pragma once

#include <atomic>
#include <memory>

#include "cadre/os/system.h"

namespace cadre::os {

class Interrupt {
 public:
  explicit Interrupt(System& system) : event_(system.make_event()) {}

  // Ends present and future waits. Idempotent.
  void raise() {
    raised_.store(true, std::memory_order_release);
    event_->notify();
  }
  bool is_raised() const { return raised_.load(std::memory_order_acquire); }

  // To be included in every System::poll.
  Event& event() const { return *event_; }

 private:
  std::atomic<bool> raised_{false};
  std::unique_ptr<Event> event_;
};

}  // namespace cadre::os
