// A pool of wake-up events, which threads borrow while they wait. It needs only as many events as
// threads wait at the same time, not one for each object that a thread can wait for.
//
// Threads: all methods from any thread; a Lease belongs to one. Blocking: never.
// Lifetime: the pool outlives its leases; the System outlives the pool.
// Errors: kUnavailable when the process has no descriptor left.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"

namespace cadre::os {

class EventPool {
 public:
  // Lends an event, which is not signalled at first. All code that may notify the event must be
  // unregistered before the lease ends, because the event is then lent to another thread.
  class Lease {
   public:
    Lease(EventPool& pool, std::unique_ptr<Event> event) : pool_(&pool), event_(std::move(event)) {}
    ~Lease() {
      if (event_ != nullptr) pool_->put_back(std::move(event_));
    }
    Lease(Lease&&) = default;
    Lease& operator=(Lease&&) = delete;

    Event& event() const { return *event_; }

   private:
    EventPool* pool_;
    std::unique_ptr<Event> event_;
  };

  explicit EventPool(System& system) : system_(system) {}

  Result<Lease> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        std::unique_ptr<Event> event = std::move(free_.back());
        free_.pop_back();
        return Lease(*this, std::move(event));
      }
    }
    try {
      return Lease(*this, system_.make_event());
    } catch (const Error& error) {
      return error;
    }
  }

 private:
  void put_back(std::unique_ptr<Event> event) {
    event->clear();
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

  System& system_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Event>> free_;
};

}  // namespace cadre::os
