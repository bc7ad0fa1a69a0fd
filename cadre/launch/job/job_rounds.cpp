// The part of this host in a job on several hosts: starts and stops workers as the agent orders.
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/launch/hosts/join_job.h"
#include "cadre/launch/job/error_file.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/job_run.h"

namespace cadre::launch {
namespace {

constexpr Duration kTick = std::chrono::seconds(1);

}  // namespace

Status JobRun::open_agent() {
  auto options = prepare_agent(system_, *spec_.hosts,
                               {.job = identity_.run_id,
                                .role = spec_.role,
                                .num_workers = static_cast<uint32_t>(spec_.num_workers),
                                .max_restarts = static_cast<uint32_t>(spec_.max_restarts),
                                .stop_grace = spec_.stop_grace});
  if (!options.ok()) return options.error();
  agent_ = std::make_unique<HostAgent>(system_, *std::move(options), log_);
  return {};
}

Result<int> JobRun::run_rounds() {
  attempt_.emplace(system_, output_, error_, spec_.stop_grace);  // it has no workers
  if (const Status opened = open_agent(); !opened.ok()) {
    drain_outputs();
    return opened.error();
  }
  while (true) {
    await_round();
    if (guardian_is_gone_ || !round_) return finish_rounds();
    run_round();
    if (guardian_is_gone_) return finish_rounds();
  }
}

// Waits until the agent orders to start workers or to end.
void JobRun::await_round() {
  is_between_attempts_ = true;
  while (!round_ && !end_ && !guardian_is_gone_) step(system_.deadline_in(kTick));
  is_between_attempts_ = false;
}

void JobRun::run_round() {
  const TimePoint began = system_.now();
  last_failure_.reset();
  identity_.ranks = round_->ranks;
  identity_.attempt = static_cast<int>(round_->round) - 1;
  identity_.restart_count = static_cast<int>(round_->num_restarts);
  identity_.job_id = cadre::format("{:016x}", round_->job_id);
  identity_.store_host = round_->store_host;
  identity_.store_port = round_->store_port;
  if (round_->store_port == 0) {
    return end_round(Outcome::kFailed, "the coordinator could not open the store of the round");
  }
  is_round_running_ = true;
  if (const Status started = start(); !started.ok()) {
    say(started.error().message());
    return end_round(Outcome::kFailed, started.error().message());
  }
  record({.state = "RENDEZVOUS", .duration = system_.now() - began});
  record_starts();
  watch();
  attempt_->finish_output();
  record_ends();
  report_round();
}

// Reports to the agent, and if a worker has failed to the user, how the workers have ended.
void JobRun::report_round() {
  last_failure_ = attempt_->group().first_failure();
  if (last_failure_) {
    report(*last_failure_, Deadline(system_.now()));
    const bool is_final = exited_with_one_of(spec_.final_exit_codes, last_failure_->status);
    return end_round(is_final ? Outcome::kFailedForGood : Outcome::kFailed,
                     cadre::format("rank {} (pid {}) ended with {}", last_failure_->rank,
                                   last_failure_->pid, exit_name(last_failure_->status)));
  }
  if (!attempt_->unkillable().empty()) {
    attempt_->say_unkillable();
    return end_round(Outcome::kFailed, "a process of a worker could not be killed");
  }
  const bool was_stopped =
      !attempt_->group().all_ended() ||
      std::ranges::any_of(attempt_->group().exits(), &WorkerExit::was_asked_to_stop);
  end_round(was_stopped ? Outcome::kStopped : Outcome::kSucceeded, "");
}

void JobRun::end_round(Outcome outcome, std::string reason) {
  is_round_running_ = false;
  round_.reset();
  agent_->workers_ended(outcome, std::move(reason));
}

void JobRun::take_orders() {
  for (HostOrder& order : agent_->take_orders()) {
    using Kind = HostOrder::Kind;
    const bool is_about_workers = order.kind == Kind::kStop || order.kind == Kind::kKill;
    if (is_about_workers && round_ && !is_round_running_) {
      end_round(Outcome::kStopped, "");  // they were not started yet
      continue;
    }
    switch (order.kind) {
      case Kind::kStart:
        round_ = std::move(order);
        break;
      case Kind::kStop:
        if (is_round_running_ && attempt_->phase() == Attempt::Phase::kRunning) {
          attempt_->keep_waiting(may_keep_workers());
          attempt_->end_round(!order.is_for_newcomers);
        }
        break;
      case Kind::kNameLost:
        if (is_round_running_) attempt_->group().name_lost_ranks(order.lost_ranks);
        break;
      case Kind::kKill:
        // A worker that waits has no group, so it need not end before another round starts.
        if (is_round_running_) {
          attempt_->keep_waiting(may_keep_workers());
          attempt_->kill_by(order.by);
        }
        break;
      case Kind::kSay:
        // An agent that waits says so again and again.
        if (order.text != last_said_) say(order.text);
        last_said_ = std::move(order.text);
        break;
      case Kind::kEnd:
        end_ = std::move(order);
        break;
    }
  }
}

int JobRun::finish_rounds() {
  stop_kept_workers();
  for (const std::string& line : log_.take_last()) say(line);
  if (!guardian_is_gone_ && !last_failure_) conclude_preemption(std::nullopt);
  const bool has_failed = end_ && end_->exit_code != 0;
  if (has_failed) say(end_->text);
  if (has_failed && last_failure_) leave_for_caller(*last_failure_);
  if (guardian_is_gone_) say("`cadre run` was killed; its workers were killed too");
  const bool is_own_failure = has_failed && last_failure_ && stop_signal_ == 0;
  int code = exit_code(is_own_failure ? last_failure_ : std::nullopt);
  if (has_failed && code == 0) code = end_->exit_code;
  record({.state = code == 0 ? "SUCCEEDED" : "FAILED"});
  drain_outputs();
  return code;
}

}  // namespace cadre::launch
