// A flag that ends every wait of a group. A thread that finds a failure raises it, and every wait
// reads it.
//
// Threads: all methods from any thread. Blocking: never.
// Lifetime: outlives the transports, engines and registrations that were given it.
// The flag has no event (eventfd) of its own, so that an idle group needs no descriptor: a thread
// registers the event that it polls for the time of its wait.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "cadre/core/os/socket.h"

namespace cadre::os {

class Interrupt {
 public:
  // raise() notifies the event while the registration lives. A waiting thread registers first and
  // then checks is_raised(): so either it sees the flag, or the event is notified.
  class Registration {
   public:
    Registration(const Interrupt& interrupt, Event& event) : interrupt_(interrupt), event_(event) {
      const std::lock_guard lock(interrupt_.mutex_);
      interrupt_.waiting_.push_back(&event_);
    }
    ~Registration() {
      const std::lock_guard lock(interrupt_.mutex_);
      interrupt_.waiting_.erase(std::ranges::find(interrupt_.waiting_, &event_));
    }
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

   private:
    const Interrupt& interrupt_;
    Event& event_;
  };

  // Ends present and future waits. A second call does nothing.
  void raise() {
    raised_.store(true, std::memory_order_release);
    const std::lock_guard lock(mutex_);
    for (Event* event : waiting_) event->notify();
  }
  bool is_raised() const { return raised_.load(std::memory_order_acquire); }

 private:
  std::atomic<bool> raised_{false};
  mutable std::mutex mutex_;
  // The registered events. The member is mutable because const methods register.
  mutable std::vector<Event*> waiting_;
};

}  // namespace cadre::os
