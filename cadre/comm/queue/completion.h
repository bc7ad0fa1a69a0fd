// What every issued operation shares: whether it is done, and with which error.
//
// Threads: complete() once, by the holder of the progress role; the rest from any thread.
// Blocking: never; how to wait is the queue's affair. Lifetime: owned by the Works of the
// operation. Errors: rethrow() throws the operation's error, the same one each time.
#pragma once

#include <atomic>
#include <optional>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/comm/work.h"

namespace cadre {

class IssuedState : public Work::State {
 public:
  bool is_completed() const final { return is_done_.load(std::memory_order_acquire); }
  std::optional<Error> error() const final {
    if (!is_completed() || status_.ok()) return std::nullopt;
    return status_.error();
  }

 protected:
  void complete_with(Status status) {
    status_ = std::move(status);
    is_done_.store(true, std::memory_order_release);
  }
  // REQUIRES: is_completed().
  void rethrow() const { status_.value_or_throw(); }

 private:
  Status status_;  // written before is_done_, read after it
  std::atomic<bool> is_done_{false};
};

}  // namespace cadre
