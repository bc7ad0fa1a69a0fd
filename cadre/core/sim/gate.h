// Lets one kernel thread pass once for each open().
//
// Threads: open() from any, pass() from one. Blocking: pass().
// pass() waits without a Deadline: a gate opens when a simulated thread gets its turn, and real
// time has no meaning in the simulation. An endless run ends at the scheduler's limit on scheduling
// points. If a thread never gives up its turn, the owner notices that with pass_within().
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace cadre::sim {

class Gate {
 public:
  void open() {
    // Notified under the lock, because the passing thread may destroy the gate as soon as it is
    // unlocked.
    const std::scoped_lock lock(mutex_);
    is_open_ = true;
    changed_.notify_one();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_open_; });
    is_open_ = false;
  }
  // Passes like pass(), but returns false if the gate did not open within `limit` of real time.
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
