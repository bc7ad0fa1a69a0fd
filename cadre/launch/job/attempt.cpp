#include "cadre/launch/job/attempt.h"

#include <signal.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/failure_report.h"

namespace cadre::launch {
namespace {

// The time in which processes that ended workers left running may end by themselves, as the helper
// processes of Python do.
constexpr Duration kLinger = std::chrono::milliseconds(500);
// The time between SIGTERM and SIGKILL for such processes.
constexpr Duration kLeftoverGrace = std::chrono::seconds(5);
constexpr Duration kKillTimeout = std::chrono::seconds(5);
constexpr Duration kOutputTimeout = std::chrono::seconds(5);
constexpr Duration kTick = std::chrono::seconds(1);
// SIGKILL is repeated at this interval to reach processes that were forked meanwhile. The files of
// workers that come to wait are read at this interval, too.
constexpr Duration kKillTick = std::chrono::milliseconds(20);

std::string names_of(std::span<const os::Descendant> processes) {
  std::string text;
  for (const os::Descendant& process : processes) {
    text += cadre::format("{}{} (pid {})", text.empty() ? "" : ", ", process.name, process.pid);
  }
  return text;
}

std::string grace_text(Duration grace, int signal) {
  return cadre::format("{:g} s of {}", std::chrono::duration<double>(grace).count(),
                       os::signal_name(signal));
}

}  // namespace

Attempt::Attempt(os::System& system, BufferedOutput& output, BufferedOutput& error,
                 Duration stop_grace)
    : system_(system),
      error_(error),
      stop_grace_(stop_grace),
      group_(system, output, error),
      phase_deadline_(system.now()),
      say_waiting_at_(system.now()) {}

void Attempt::keep_waiting(bool is_kept) {
  keeps_waiting_ = is_kept;
  group_.keep_waiting(is_kept);
}

Deadline Attempt::next_due() const {
  const bool is_short = phase_ == Phase::kKilling || phase_ == Phase::kRecovering;
  const Deadline tick = system_.deadline_in(is_short ? kKillTick : kTick);
  return phase_ == Phase::kRunning ? tick : tick.earlier(phase_deadline_);
}

void Attempt::ask_to_stop(int signal) {
  group_.ask_to_stop(signal);
  // A limit that kill_by() has set holds: another round may start elsewhere when it has passed.
  const bool is_limited = must_kill_ && phase_ == Phase::kRecovering;
  const Duration grace =
      is_limited ? std::min(stop_grace_, phase_deadline_.remaining(system_.now())) : stop_grace_;
  enter(Phase::kStopping, grace);
  grace_ = grace_text(grace, signal);
  say_waiting_at_ = system_.deadline_in(kTick);
}

// Stops the processes that workers left running only after all workers have ended, because a worker
// may need them until then.
void Attempt::wait_for_stop() {
  // A worker may have stopped waiting, or the owner may have decided to end the job.
  if (keeps_waiting_) group_.read_recovery_files();
  group_.ask_rest_to_stop(SIGTERM);
  if (phase_deadline_.has_passed(system_.now())) return kill_outlived();
  if (group_.all_settled()) {
    group_.ask_leftovers_to_stop();
    if (!std::exchange(has_asked_leftovers_, true)) say_waiting_at_ = system_.deadline_in(kTick);
  }
  if (say_waiting_at_.has_passed(system_.now())) say_waiting();
}

// Logs which rank failed and which processes have not ended, if stopping takes long.
void Attempt::say_waiting() {
  const auto failure = group_.first_failure();
  const std::vector<int> ranks = group_.running_ranks();
  std::string awaited;
  if (!ranks.empty()) {
    if (!failure || std::exchange(has_said_ranks_, true)) return;
    awaited = cadre::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", rank_ranges(ranks));
  } else {
    const auto leftovers = group_.descendants();
    if (leftovers.empty() || std::exchange(has_said_leftovers_, true)) return;
    awaited = names_of(leftovers);
  }
  const std::string reason =
      failure ? cadre::format("rank {} failed with {}", failure->rank, exit_name(failure->status))
              : "the workers have ended";
  say(cadre::format("{}; waiting for {} to end, killed if not within {}", reason, awaited, grace_));
}

void Attempt::kill_outlived() {
  outlived_ = group_.running_ranks();
  std::string killed;
  if (!outlived_.empty()) {
    killed =
        cadre::format("{} {}", outlived_.size() == 1 ? "rank" : "ranks", rank_ranges(outlived_));
  }
  const auto leftovers =
      group_.all_settled() ? group_.descendants() : std::vector<os::Descendant>();
  if (!leftovers.empty()) killed += names_of(leftovers);
  const size_t num_killed = outlived_.size() + leftovers.size();
  if (num_killed > 0) {
    say(cadre::format("killed, because {} did not end within {}: {}",
                      num_killed == 1 ? "it" : "they", grace_, killed));
  }
  kill_all();
}

void Attempt::kill_all() {
  if (phase_ != Phase::kKilling) enter(Phase::kKilling, kKillTimeout);
  group_.ask_to_stop(SIGKILL);
  os::signal_processes(group_.descendants(), SIGKILL);
}

bool Attempt::is_over() {
  if (group_.all_ended() && !group_.has_children()) return true;
  const bool is_stopping = phase_ == Phase::kStopping || phase_ == Phase::kKilling;
  if (is_stopping && group_.all_settled() && !group_.has_children()) return true;
  if (phase_ != Phase::kKilling) return false;
  std::vector<os::Descendant> left = group_.descendants();
  const bool is_hopeless = !left.empty() && std::ranges::none_of(left, os::may_signal);
  if (!is_hopeless && !phase_deadline_.has_passed(system_.now())) return false;
  unkillable_ = std::move(left);
  return true;
}

void Attempt::watch_workers() {
  if (group_.first_failure()) {
    end_round(true);
  } else if (group_.all_ended()) {
    enter(Phase::kLingering, kLinger);
  } else if (phase_ == Phase::kLeaving) {
    if (phase_deadline_.has_passed(system_.now())) kill_outlived();
  } else if (const auto preempted = group_.first_preempted()) {
    enter(Phase::kLeaving, stop_grace_);
    grace_ = cadre::format("{:g} s of the end of rank {}",
                           std::chrono::duration<double>(stop_grace_).count(), preempted->rank);
  }
}

std::optional<Duration> Attempt::time_to_come() {
  group_.read_recovery_files();
  return keeps_waiting_ && !group_.first_preempted() ? group_.recovery_time() : std::nullopt;
}

void Attempt::kill_by(TimePoint by) {
  const auto time = time_to_come();
  const bool may_come = phase_ == Phase::kRunning || phase_ == Phase::kRecovering;
  if (!time || !may_come || by <= system_.now()) {
    // The owner calls this when the limit that it has set passes, perhaps before this object has
    // noticed that.
    const bool is_limit =
        must_kill_ && (phase_ == Phase::kRecovering || phase_ == Phase::kStopping);
    const bool has_passed = is_limit && phase_deadline_.remaining(system_.now()) <= kKillTick;
    return has_passed ? kill_outlived() : kill_all();
  }
  must_kill_ = true;
  group_.ask_unable_to_stop(SIGKILL);
  Deadline limit = Deadline(by).earlier(system_.deadline_in(*time));
  if (phase_ == Phase::kRecovering) limit = limit.earlier(phase_deadline_);
  phase_ = Phase::kRecovering;
  phase_deadline_ = limit;
  grace_ = cadre::format("{:.1f} s of the loss of the coordinator",
                         std::chrono::duration<double>(limit.remaining(system_.now())).count());
  say_waiting_at_ = system_.deadline_in(kTick);
  watch_recovery();
}

void Attempt::end_round(bool awaits_survivors) {
  const auto time = time_to_come();
  if (!time) {
    keep_waiting(false);
    ask_to_stop(SIGTERM);
    return wait_for_stop();  // now, because no event may wake the loop
  }
  group_.ask_unable_to_stop(SIGTERM);
  enter(Phase::kRecovering, awaits_survivors ? *time : Duration{});
  grace_ = cadre::format("{:g} s of the failure", std::chrono::duration<double>(*time).count());
  say_waiting_at_ = system_.deadline_in(kTick);
  watch_recovery();
}

// The processes that ended workers have left are stopped when no worker may need them any more, so
// in the phase kStopping.
void Attempt::watch_recovery() {
  group_.read_recovery_files();
  const bool is_due = phase_deadline_.has_passed(system_.now());
  if (!is_due && keeps_waiting_ && !group_.all_settled()) {
    if (say_waiting_at_.has_passed(system_.now())) say_recovering();
    return;
  }
  if (must_kill_) return kill_all();
  ask_to_stop(SIGTERM);
  wait_for_stop();
}

void Attempt::say_recovering() {
  const std::vector<int> ranks = group_.running_ranks();
  if (ranks.empty() || std::exchange(has_said_ranks_, true)) return;
  say(
      cadre::format("waiting for {} {} to come to wait for the new membership (Recovery), replaced "
                    "if not within {}",
                    ranks.size() == 1 ? "rank" : "ranks", rank_ranges(ranks), grace_));
}

void Attempt::advance() {
  if (phase_ == Phase::kRunning || phase_ == Phase::kLeaving) return watch_workers();
  if (phase_ == Phase::kRecovering) return watch_recovery();
  if (phase_ == Phase::kKilling) return kill_all();
  if (phase_ == Phase::kStopping) return wait_for_stop();
  if (!phase_deadline_.has_passed(system_.now())) return;
  const auto leftovers = group_.descendants();
  if (leftovers.empty()) return group_.reap_orphans();
  say(cadre::format("the workers have ended; stopping what they left running: {}",
                    names_of(leftovers)));
  group_.ask_leftovers_to_stop();
  has_asked_leftovers_ = true;
  has_said_leftovers_ = true;
  grace_ = grace_text(kLeftoverGrace, SIGTERM);
  enter(Phase::kStopping, kLeftoverGrace);
}

void Attempt::say_unkillable() {
  const auto others = std::ranges::stable_partition(unkillable_, os::may_signal);
  const std::span stuck(unkillable_.begin(), others.begin());
  if (!stuck.empty()) {
    say(cadre::format("could not be killed, because the kernel does not end {}: {}",
                      stuck.size() == 1 ? "it" : "them", names_of(stuck)));
  }
  if (!others.empty()) {
    say(cadre::format("could not be killed, because {} another user's: {}",
                      others.size() == 1 ? "it is" : "they are", names_of(others)));
  }
}

void Attempt::finish_output() {
  // If a process could not be killed, the wait is short, because such a process keeps its pipe
  // open.
  const Deadline ended = system_.deadline_in(unkillable_.empty() ? kOutputTimeout : kLinger);
  while (!group_.output_has_ended() && !ended.has_passed(system_.now())) group_.step({}, ended);
  group_.finish_output();
}

}  // namespace cadre::launch
