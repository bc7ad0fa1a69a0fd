// One run of a job, from its start to the report of its failure (job.h). job.cpp has the run of a
// job on one host, job_rounds.cpp that of a host's part in a job on several hosts.
//
// Threads: the process's main thread. Blocking: run(), as long as the job runs.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/inherited.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/launch/hosts/host_agent.h"
#include "cadre/launch/job/attempt.h"
#include "cadre/launch/job/error_file.h"
#include "cadre/launch/job/failure_report.h"
#include "cadre/launch/job/job.h"
#include "cadre/launch/job/job_events.h"
#include "cadre/launch/job/output/job_logs.h"
#include "cadre/launch/job/output/queued_log.h"
#include "cadre/launch/job/restarts.h"
#include "cadre/launch/job/worker_environment.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {

class JobRun {
 public:
  // `fork_server`: the one from which all workers are forked; null if they are executed.
  JobRun(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone,
         std::unique_ptr<os::ForkServer> fork_server);

  Result<int> run();

 private:
  Status raise_limits();
  void log_binding();
  void identify();
  Status open_logs();
  Status open_events();
  void record(JobEvent event);
  void record_starts();
  void record_ends();
  Status begin_logs();
  StreamTargets targets(Stream stream, int local_rank) const;
  std::string error_path_of(Rank rank) const;
  std::string log_folder_of(Rank rank) const;
  void open_fork_server();
  void accept_template();
  Status open_store();
  Status start();
  Result<int> run_attempts();
  // The host's part in a job on several hosts: starts and stops workers as the agent orders.
  Result<int> run_rounds();
  Status open_agent();
  void await_round();
  void run_round();
  void report_round();
  void end_round(Outcome outcome, std::string reason);
  void take_orders();
  int finish_rounds();
  std::vector<WorkerSpec> worker_specs(const JobIdentity& identity);
  std::string prefix_of(Rank rank) const;
  void watch();
  void step(Deadline wake);
  bool will_restart();
  bool may_keep_workers();
  void stop_kept_workers();
  bool wait_to_restart(Duration lifetime);
  void take_signals();
  void on_stop_signal(int signal);
  void on_unhandled_signal(int signal);
  void say(std::string_view line) { error_.append_line("cadre: ", line); }
  void say_stopped();
  void say_lost_output();
  void say_restarts(const std::optional<WorkerExit>& failure);
  void conclude_preemption(const std::optional<WorkerExit>& failure);
  void show_log();
  void drain_outputs();
  std::optional<CrashReport> crash_of(const WorkerExit& failure);
  void report(const WorkerExit& failure, Deadline drained);
  int finish(const std::optional<WorkerExit>& failure);
  JobFailure failure_for_caller(const WorkerExit& failure) const;
  void leave_for_caller(const WorkerExit& failure);
  int exit_code(const std::optional<WorkerExit>& failure) const;

  os::System& system_;
  const JobSpec& spec_;
  os::Pollable& guardian_gone_;
  const TimePoint began_ = system_.now();
  // Blocks signals in its constructor, so it must be constructed before any member that starts a
  // thread, which inherits the mask.
  os::SignalListener signals_;
  BufferedOutput output_{os::OutputStream::Target::kStandardOutput};
  const std::unique_ptr<BufferedOutput> own_error_ =
      os::outputs_are_one()
          ? nullptr
          : std::make_unique<BufferedOutput>(os::OutputStream::Target::kStandardError);
  BufferedOutput& error_ = own_error_ ? *own_error_ : output_;
  QueuedLog log_;
  JobIdentity identity_;
  os::SoftLimits worker_limits_;
  std::unique_ptr<TcpStoreServer> store_;        // the store of the current attempt
  std::unique_ptr<os::ForkServer> fork_server_;  // null unless workers may be forked
  std::unique_ptr<JobLogs> logs_;                // null unless there are log files
  std::unique_ptr<JobEvents> events_;            // null unless events are written
  std::optional<Attempt> attempt_;
  uint64_t num_memory_kills_before_ = 0;

  std::unique_ptr<HostAgent> agent_;        // null if the job has one host
  std::optional<HostOrder> round_;          // the order to start the present or the next round
  bool is_round_running_ = false;           // its workers were started and have not all ended
  std::string last_said_;                   // the last sentence of the agent
  std::optional<HostOrder> end_;            // the order to end
  std::optional<WorkerExit> last_failure_;  // of this host's workers in the last round

  RestartPolicy restarts_;
  std::vector<WorkerExit> failures_;  // the failures that led to restarts
  bool is_between_attempts_ = false;
  bool is_restart_called_off_ = false;  // stop_signal_ came before the restart
  int stop_signal_ = 0;                 // the first signal that stopped the job; 0 if none did
  // The first signal of the present attempt, if it was SIGUSR1 or SIGUSR2; else 0.
  int notice_signal_ = 0;
  TimePoint last_stop_signal_;
  bool guardian_is_gone_ = false;
  bool has_said_lost_output_ = false;
  size_t num_lost_logs_ = 0;  // log files that could not be written
  // Set at the end if workers began to leave because a scheduler ends the job: the exit code with
  // which all left after they had saved the same step, or 0 if they did not.
  std::optional<int> preemption_code_;
};

}  // namespace cadre::launch
