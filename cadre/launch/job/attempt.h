// One attempt of a job: the workers from their start to the end of the last process that they
// left. A job has more than one attempt if failed workers are started again.
//
// Threads: one, that of the WorkerGroup. Blocking: finish_output() for a few seconds at most. The
// owner's loop calls WorkerGroup::step() with next_due() as its deadline, then keep_waiting() and
// advance(), until is_over(). Lifetime: the outputs outlive the Attempt. Progress is reported on
// the error output.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/descendants.h"
#include "cadre/core/os/system.h"
#include "cadre/launch/job/output/buffered_output.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

class Attempt {
 public:
  // Each phase except kRunning has a time limit.
  enum class Phase {
    kRunning,
    kLeaving,     // a worker has saved and left (preemption); the others have time to do the same
    kRecovering,  // a worker has failed; those that can wait have time to come to wait
    kLingering,   // the workers have ended; processes that they started may still end
    kStopping,    // the stop signal was sent; the processes have time to end
    kKilling      // SIGKILL is being sent to every process of the attempt
  };

  // `stop_grace`: the time between the first signal to a worker and SIGKILL.
  Attempt(os::System& system, BufferedOutput& output, BufferedOutput& error, Duration stop_grace);

  WorkerGroup& group() { return group_; }
  const WorkerGroup& group() const { return group_; }
  Phase phase() const { return phase_; }

  // Says whether the job goes on after this attempt if a worker has failed. If so, workers that
  // wait for a new membership are kept; else they are stopped with the others.
  void keep_waiting(bool is_kept);
  // Stops the workers because the job's round has ended elsewhere, except those that wait. If
  // `awaits_survivors`, those that can wait have time to come.
  void end_round(bool awaits_survivors);

  // Returns whether a worker has failed a second ago, and some that can wait have not come to wait.
  bool awaits_survivors() const { return phase_ == Phase::kRecovering && has_said_ranks_; }

  // Returns the time at which advance() must be called even without an event.
  Deadline next_due() const;
  // Enters the next phase if its time has come. The failure of a worker leads from kRunning, or
  // kLeaving, to kStopping, and to kRecovering before it if a worker can wait and is kept.
  void advance();
  // Sends the signal to the workers. When they have ended, sends SIGTERM to the processes that they
  // left running.
  void ask_to_stop(int signal);
  void kill_all();
  // Stops the workers because workers of another round may start elsewhere: those that can wait
  // have until `by` to come to wait, all others are killed at once.
  void kill_by(TimePoint by);
  // Returns whether no process is left, except those that are kept or could not be killed.
  bool is_over();

  // Passes on the rest of the workers' output. REQUIRES: is_over().
  void finish_output();
  // Processes that are left after the attempt.
  std::span<const os::Descendant> unkillable() const { return unkillable_; }
  void say_unkillable();

  // The ranks that were killed because they had not ended in time. grace() is that time as text,
  // such as "30 s of SIGTERM".
  std::span<const int> outlived() const { return outlived_; }
  const std::string& grace() const { return grace_; }

 private:
  void watch_workers();
  void watch_recovery();
  // Returns how long the running workers that can wait may take to come to wait; nullopt if none
  // can, or none is kept.
  std::optional<Duration> time_to_come();
  void wait_for_stop();
  void say_waiting();
  void say_recovering();
  void kill_outlived();
  void say(std::string_view line) { error_.append_line("cadre: ", line); }

  void enter(Phase phase, Duration limit) {
    phase_ = phase;
    phase_deadline_ = system_.deadline_in(limit);
  }

  os::System& system_;
  BufferedOutput& error_;
  const Duration stop_grace_;
  WorkerGroup group_;
  bool keeps_waiting_ = false;
  bool must_kill_ = false;  // the phase kRecovering ends with kKilling

  Phase phase_ = Phase::kRunning;
  Deadline phase_deadline_;
  std::vector<os::Descendant> unkillable_;

  // The members up to outlived_ are the state of the phase kStopping.
  std::string grace_;
  Deadline say_waiting_at_;
  bool has_said_ranks_ = false;
  bool has_asked_leftovers_ = false;
  bool has_said_leftovers_ = false;
  std::vector<int> outlived_;
};

}  // namespace cadre::launch
