// Decides whether and when the workers of a job are started again after a failure, and formats the
// list of the failures that led to restarts.
//
// Threads: plain values. Blocking: never. Source: torchrun's --max-restarts. torchrun restarts
// without a delay; here several short attempts in a row are delayed by an exponential backoff, so
// that a program that fails in its first lines does not keep the machine busy.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

class RestartPolicy {
 public:
  // An attempt is short if its worker failed before this time.
  static constexpr Duration kShortLifetime = std::chrono::seconds(10);
  // The delay after the second short attempt in a row. It doubles with each further one, up to
  // kMaxDelay.
  static constexpr Duration kFirstDelay = std::chrono::milliseconds(100);
  static constexpr Duration kMaxDelay = std::chrono::seconds(5);

  explicit RestartPolicy(int max_restarts) : max_restarts_(max_restarts) {}

  bool has_restart_left() const { return num_restarts_ < max_restarts_; }
  // Counts a restart, and returns the time to wait before it. `lifetime` is the lifetime of the
  // worker that failed. REQUIRES: has_restart_left().
  Duration next_delay(Duration lifetime);

  int num_restarts() const { return num_restarts_; }
  int max_restarts() const { return max_restarts_; }

 private:
  int max_restarts_;
  int num_restarts_ = 0;
  Duration delay_{};  // the delay of the next restart after a short attempt
};

// Returns one line: "rank 0: signal 9 (SIGKILL) after 12.3 s; rank 2: exit code 3 after 0.1 s". If
// there are many failures, lists the last ones and begins with the number of the others: "12 not
// listed; rank 0: ...".
std::string failures_text(std::span<const WorkerExit> failures);

}  // namespace cadre::launch
