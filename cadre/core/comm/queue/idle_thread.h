// A thread that exists while there is work for it: started by the first work, ended when there has
// been none for a while, started again by the next. So a process with many groups that rest has no
// thread for any of them.
//
// Threads: start(), take(), unpark() and note_end() under the mutex of the owner; park() in the
// thread, without it. Blocking: park(). Lifetime: the owner joins what start() and take() return,
// without the mutex, before it is destroyed. Errors: start() throws kUnavailable when no thread can
// be started, and nothing has changed then.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/system.h"

namespace cadre {

class IdleThread {
 public:
  // A thread that has had nothing to do for so long ends.
  static constexpr Duration kIdleTime = std::chrono::seconds(1);

  explicit IdleThread(os::System& system, std::string name)
      : system_(system), name_(std::move(name)) {}

  // If it does not run. The result is a thread that ended before, to be joined without the mutex.
  [[nodiscard]] std::unique_ptr<os::Thread> start(std::function<void()> body) {
    if (is_running_) return nullptr;
    if (waiter_ == nullptr) waiter_ = system_.make_waiter();
    auto started = system_.spawn(name_, std::move(body));
    is_running_ = true;
    return std::exchange(thread_, std::move(started));
  }
  // The thread that runs or ran last; no other is to be started.
  [[nodiscard]] std::unique_ptr<os::Thread> take() { return std::move(thread_); }
  void unpark() {
    if (waiter_ != nullptr) waiter_->unpark();
  }

  // In the thread, without the mutex: false when it was not unparked in time.
  bool park() { return waiter_->park(system_.deadline_in(kIdleTime)); }
  // In the thread, under the mutex, as the last thing it does there.
  void note_end() { is_running_ = false; }

 private:
  os::System& system_;
  const std::string name_;
  bool is_running_ = false;
  std::unique_ptr<os::Waiter> waiter_;
  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre
