// Reads something that may block indefinitely, such as a folder of a network file system whose
// server is gone, in a thread of its own.
//
// Threads: one. Blocking: take() for at most `limit` after the constructor; then the thread is
// abandoned, and ends when the body returns. The end of the process waits for abandoned threads for
// at most 2 s (run_detached()). If no thread can be started, the constructor runs the body.
// Lifetime: the body owns what it uses, because it may outlive its caller.
// Errors: kTimeout; kUnavailable if the body has thrown.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/native/native_thread.h"
#include "cadre/core/os/system.h"

namespace cadre::cli {

template <typename T>
class BackgroundRead {
 public:
  explicit BackgroundRead(std::function<T()> body) {
    const std::function<void()> run = [shared = shared_, body = std::move(body)] {
      try {
        shared->result = body();
      } catch (const std::exception& error) {
        shared->failure = error.what();
      }
      shared->is_done.store(true, std::memory_order_release);
      shared->waiter->unpark();
    };
    try {
      os::run_detached("doctor", run);
    } catch (const Error&) {
      run();
    }
  }

  // Returns the result. REQUIRES: was not called before.
  Result<T> take(Duration limit) {
    const Deadline deadline(begin_ + limit);
    while (!shared_->is_done.load(std::memory_order_acquire)) {
      if (!shared_->waiter->park(deadline) && !shared_->is_done.load(std::memory_order_acquire)) {
        return Error(
            ErrorCode::kTimeout,
            cadre::format("no answer within {:g} s", std::chrono::duration<double>(limit).count()));
      }
    }
    if (!shared_->result) return Error(ErrorCode::kUnavailable, shared_->failure);
    return *std::move(shared_->result);
  }

 private:
  struct Shared {
    const std::unique_ptr<os::System> system = os::make_native_system();
    const std::unique_ptr<os::Waiter> waiter = system->make_waiter();
    std::atomic<bool> is_done{false};
    std::optional<T> result = {};
    std::string failure = {};  // why there is no result
  };

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  const TimePoint begin_ = shared_->system->now();
};

}  // namespace cadre::cli
