// Where a transport's waiting thread is found by those that have news for it.
//
// Threads: notify() from any thread, allowed under a mutex; the rest from the waiting thread.
// Blocking: never. Lifetime: outlives all that may notify it.
#pragma once

#include <atomic>
#include <mutex>

#include "cadre/core/os/socket.h"

namespace cadre {

class WaitSpot {
 public:
  // The event is notified with the spot while the stay lives.
  class Stay {
   public:
    Stay(WaitSpot& spot, os::Event& event) : spot_(spot) { spot_.set_event(&event); }
    ~Stay() { spot_.set_event(nullptr); }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;

   private:
    WaitSpot& spot_;
  };

  void notify() {
    has_news_.store(true, std::memory_order_release);
    const std::lock_guard lock(mutex_);
    if (event_ != nullptr) event_->notify();
  }
  // Whether there was a notify() since the last call. What it was for is looked at afterwards.
  bool take_news() {
    return has_news_.load(std::memory_order_acquire) &&
           has_news_.exchange(false, std::memory_order_acq_rel);
  }

 private:
  void set_event(os::Event* event) {
    const std::lock_guard lock(mutex_);
    event_ = event;
  }

  std::atomic<bool> has_news_{false};
  std::mutex mutex_;
  os::Event* event_ = nullptr;
};

}  // namespace cadre
