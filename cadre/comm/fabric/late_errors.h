// Errors of groups that this process has already closed, until a close() throws them.
//
// Threads: any. Blocking: never. Lifetime: shared by the fabric and its groups.
#pragma once

#include <deque>
#include <mutex>
#include <optional>

#include "cadre/base/error.h"

namespace cadre {

class LateErrors {
 public:
  void add(const Error& error) {
    const std::lock_guard lock(mutex_);
    errors_.push_back(error);
  }
  // The oldest that was not taken yet.
  std::optional<Error> take() {
    const std::lock_guard lock(mutex_);
    if (errors_.empty()) return std::nullopt;
    Error error = errors_.front();
    errors_.pop_front();
    return error;
  }

 private:
  std::mutex mutex_;
  std::deque<Error> errors_;
};

}  // namespace cadre
