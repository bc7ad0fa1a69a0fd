// A queue of errors of groups that this process has already closed. When the process closes another
// group, that close() takes an error from the queue and throws it.
//
// Threads: any. Blocking: never. Lifetime: shared by the fabric and its groups.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "cadre/core/base/error.h"

namespace cadre {

class LateErrors {
 public:
  void add(const Error& error) {
    const std::lock_guard lock(mutex_);
    errors_.push_back(error);
  }
  // Takes the oldest error; nullopt if there is none.
  std::optional<Error> take() {
    const std::lock_guard lock(mutex_);
    if (errors_.empty()) return std::nullopt;
    Error error = errors_.front();
    errors_.pop_front();
    return error;
  }

  // Called when a group of this process has failed. After a failure the ranks may leave their other
  // groups at different points of the program, so a mismatch of collectives in those groups is no
  // error of the program.
  void note_failure() {
    const std::lock_guard lock(mutex_);
    ++num_failures_;
  }
  uint64_t num_failures() const {
    const std::lock_guard lock(mutex_);
    return num_failures_;
  }

 private:
  mutable std::mutex mutex_;
  std::deque<Error> errors_;
  uint64_t num_failures_ = 0;
};

}  // namespace cadre
