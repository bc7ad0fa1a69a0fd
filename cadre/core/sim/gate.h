// Lets one kernel thread pass once for each open().
//
// Threads: open() from any, pass() from one. Blocking: pass().
// Waits without a Deadline: a gate opens in a simulation's turn order, and real time has no meaning
// there. An endless run is ended by the scheduler's bound on points; a thread that keeps the baton,
// by the owner's watch with pass_within().
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace cadre::sim {

class Gate {
 public:
  void open() {
    // Notified under the lock: after it the passing thread may destroy the gate.
    const std::scoped_lock lock(mutex_);
    is_open_ = true;
    changed_.notify_one();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_open_; });
    is_open_ = false;
  }
  // False when the gate did not open within that real time.
  bool pass_within(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, limit, [this] { return is_open_; })) return false;
    is_open_ = false;
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

}  // namespace cadre::sim
