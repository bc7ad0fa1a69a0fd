// Wakes a thread that waits in a transport when another thread has received bytes, credit or the
// end of one of its streams ("news").
//
// Threads: notify() from any thread, also while it holds a mutex; the rest from the waiting thread.
// Blocking: never. Lifetime: a WaitSpot must outlive all objects that may call its notify().
#pragma once

#include <atomic>
#include <mutex>

#include "cadre/core/os/socket.h"

namespace cadre {

class WaitSpot {
 public:
  // While a Stay exists, notify() also notifies the Event that was passed to its constructor.
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
  // Returns whether notify() was called since the last call. The caller must look for the news
  // after this call, not before.
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
