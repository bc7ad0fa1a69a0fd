// A thread that is started when there is work, ends after kIdleTime without work, and is started
// again by the next work. So a process with many idle groups has no thread for any of them.
//
// Threads: start(), take(), unpark() and note_end() under the mutex of the owner; park() in the
// thread, without the mutex. Blocking: park(). Lifetime: the owner joins what start() and take()
// return, without the mutex, before the IdleThread is destroyed. Errors: start() throws
// kUnavailable if no thread can be started, and has changed nothing then.
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
  // The time without work after which the thread ends.
  static constexpr Duration kIdleTime = std::chrono::seconds(1);

  explicit IdleThread(os::System& system, std::string name)
      : system_(system), name_(std::move(name)) {}

  // Starts the thread if none runs. Returns the previous thread, which has ended and which the
  // caller joins without the mutex.
  [[nodiscard]] std::unique_ptr<os::Thread> start(std::function<void()> body) {
    if (is_running_) return nullptr;
    if (waiter_ == nullptr) waiter_ = system_.make_waiter();
    auto started = system_.spawn(name_, std::move(body));
    is_running_ = true;
    return std::exchange(thread_, std::move(started));
  }
  // Returns the thread that runs or ran last. REQUIRES: no other is started afterwards.
  [[nodiscard]] std::unique_ptr<os::Thread> take() { return std::move(thread_); }
  void unpark() {
    if (waiter_ != nullptr) waiter_->unpark();
  }

  // Called in the thread, without the mutex. Returns false if it was not unparked in time.
  bool park(Duration time = kIdleTime) { return waiter_->park(system_.deadline_in(time)); }
  // Called in the thread, under the mutex, as its last action there.
  void note_end() { is_running_ = false; }

 private:
  os::System& system_;
  const std::string name_;
  bool is_running_ = false;
  std::unique_ptr<os::Waiter> waiter_;
  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre
