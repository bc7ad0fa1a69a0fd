// Keeps a waiter in a list of waiters to wake, while it waits.
//
// Threads: the list is guarded by the mutex. Blocking: never. Lifetime: the destructor removes the
// waiter from the list, also after an exception, so that no destroyed waiter is woken.
#pragma once

#include <mutex>
#include <vector>

#include "cadre/core/os/system.h"

namespace cadre {

class WaiterListing {
 public:
  WaiterListing(std::mutex& mutex, std::vector<os::Waiter*>& list, os::Waiter& waiter)
      : mutex_(mutex), list_(list), waiter_(waiter) {
    std::lock_guard lock(mutex_);
    list_.push_back(&waiter_);
  }
  ~WaiterListing() {
    std::lock_guard lock(mutex_);
    std::erase(list_, &waiter_);
  }
  WaiterListing(const WaiterListing&) = delete;
  WaiterListing& operator=(const WaiterListing&) = delete;

 private:
  std::mutex& mutex_;
  std::vector<os::Waiter*>& list_;
  os::Waiter& waiter_;
};

}  // namespace cadre
