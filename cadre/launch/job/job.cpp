#include "cadre/launch/job/job.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/descriptor_limit.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/launch/job/error_file.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/job_run.h"
#include "cadre/launch/job/output/line_prefix.h"
#include "cadre/launch/job/preemption_report.h"

namespace cadre::launch {
namespace {

constexpr std::array kSignals{SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGUSR1,
                              SIGUSR2, SIGTSTP, SIGCONT, SIGCHLD};
// Two signals within this time count as one: people do not press Ctrl-C so quickly, but programs
// such as timeout(1) send two at once.
constexpr Duration kSameKeyPress = std::chrono::milliseconds(100);
constexpr Duration kDrainTimeout = std::chrono::seconds(5);
constexpr Duration kSuspendedTick = std::chrono::seconds(1);
// Each worker needs a pidfd and a connection to the store. Its one or two pipes are counted
// separately.
constexpr uint64_t kDescriptorsPerWorker = 2;
// The launcher's own descriptors: its outputs, the signal descriptor, the store's listener, and
// those that are open only while it starts a worker.
constexpr uint64_t kOwnDescriptors = 24;
constexpr size_t kTokenBytes = 16;
constexpr size_t kRunIdBytes = 4;

std::string random_hex(os::System& system, size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  system.random_bytes(bytes);
  std::string text;
  for (const std::byte byte : bytes) text += cadre::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

}  // namespace

JobRun::JobRun(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone,
               std::unique_ptr<os::ForkServer> fork_server)
    : system_(system),
      spec_(spec),
      guardian_gone_(guardian_gone),
      signals_(kSignals),
      log_(system, spec.log_level),
      fork_server_(std::move(fork_server)),
      restarts_(spec.max_restarts) {}

std::string JobRun::error_path_of(Rank rank) const {
  return attempt_->group().error_file(rank);
}

std::string JobRun::prefix_of(Rank rank) const {
  const std::string prefix =
      line_prefix(spec_.prefix_template, {.rank = rank,
                                          .role = spec_.role,
                                          .host = system_.host().name,
                                          .restart_count = identity_.restart_count});
  return spec_.colour_prefix && !prefix.empty() ? coloured(prefix, rank) : prefix;
}

std::vector<WorkerSpec> JobRun::worker_specs(const JobIdentity& identity) {
  std::vector<WorkerSpec> specs;
  for (int local_rank = 0; local_rank < spec_.num_workers; ++local_rank) {
    os::Environment environment = worker_environment(spec_.environment, identity, local_rank);
    // The variable is set to "" for workers that do not fork: a launcher that is itself a worker
    // may have inherited the value of the outer job.
    const bool may_fork = local_rank == 0 && fork_server_ && !fork_server_->template_pid();
    if (may_fork || environment.get(os::ForkServer::kVariable)) {
      environment.set(os::ForkServer::kVariable, may_fork ? fork_server_->path() : "");
    }
    os::ProcessOptions process{
        .executable = spec_.executable,
        .environment = environment.to_texts(),
        .ignored_signals = signals_ignored_by_workers(spec_.inherited.ignored_signals),
        .soft_limits = worker_limits_};
    process.inherits_input = spec_.input_rank == local_rank;
    if (!spec_.cores_of_rank.empty()) {
      process.cores = spec_.cores_of_rank[static_cast<size_t>(local_rank)];
    }
    for (const std::string& argument : spec_.arguments) {
      process.arguments.push_back(with_local_rank(argument, local_rank));
    }
    const Rank rank = rank_of(identity, local_rank);
    specs.push_back({.rank = rank,
                     .process = std::move(process),
                     .output = {.prefix = prefix_of(rank),
                                .is_raw = spec_.is_rank0_raw && rank == 0,
                                .output = targets(Stream::kOutput, local_rank),
                                .error = targets(Stream::kError, local_rank)},
                     .fork_server = fork_server_.get(),
                     .error_file = error_file_of(identity, local_rank),
                     .recovery_file = recovery_file_of(identity, local_rank)});
  }
  return specs;
}

Status JobRun::open_logs() {
  if (!spec_.logs.has_files()) return {};
  auto logs =
      JobLogs::make(spec_.logs, identity_.run_id, spec_.environment.get_or("TMPDIR", "/tmp"));
  if (!logs.ok()) return logs.error();
  logs_ = *std::move(logs);
  say(cadre::format("log files are in {}", logs_->folder()));
  return {};
}

Status JobRun::open_events() {
  if (spec_.events.is_empty()) return {};
  auto events = JobEvents::open(spec_.events, error_);
  if (!events.ok()) return events.error();
  events_ = *std::move(events);
  return {};
}

void JobRun::record(JobEvent event) {
  if (!events_) return;
  events_->write(event, {.job = identity_,
                         .host = system_.host().name,
                         .entry_point = spec_.arguments.front(),
                         .timestamp_ms = os::wall_clock_milliseconds(),
                         .total_run_time = system_.now() - began_});
}

void JobRun::record_starts() {
  for (int i = 0; events_ && i < spec_.num_workers; ++i) {
    const Rank rank = rank_of(identity_, i);
    record({.state = "START", .rank = rank, .pid = attempt_->group().pid(rank)});
  }
}

void JobRun::record_ends() {
  for (const WorkerExit& ended : attempt_->group().exits()) {
    record(end_of_worker(ended, error_path_of(ended.rank)));
  }
}

// Opens the log files of the present attempt. A restart goes on without them if that fails.
Status JobRun::begin_logs() {
  identity_.log_folder.clear();
  if (!logs_) return {};
  const Status begun = logs_->begin_attempt(identity_.attempt, spec_.num_workers);
  if (begun.ok()) {
    identity_.log_folder = logs_->folder();
  } else if (identity_.attempt == 0) {
    return begun;
  } else {
    say(cadre::format("{}; the output of this attempt is shown and not kept",
                      begun.error().message()));
  }
  return {};
}

StreamTargets JobRun::targets(Stream stream, int local_rank) const {
  if (logs_) return logs_->targets(stream, local_rank);
  return {.is_shown = spec_.logs.route(stream, local_rank).is_shown};
}

// Returns the folder of the worker's log files; empty if there are none.
std::string JobRun::log_folder_of(Rank rank) const {
  const int local_rank = local_rank_of(identity_, rank);
  const bool has_files = spec_.logs.route(Stream::kOutput, local_rank).is_kept ||
                         spec_.logs.route(Stream::kError, local_rank).is_kept;
  if (identity_.log_folder.empty() || !has_files) return "";
  return logs_->rank_folder(identity_.attempt, local_rank);
}

Status JobRun::raise_limits() {
  worker_limits_ = spec_.inherited.limits;
  worker_limits_.descriptors = os::raise_descriptor_limit().soft;
  const uint64_t limit = os::descriptor_limit().soft;
  uint64_t needed = kOwnDescriptors;
  for (int rank = 0; rank < spec_.num_workers; ++rank) {
    const uint64_t num_files = uint64_t{spec_.logs.route(Stream::kOutput, rank).is_kept} +
                               uint64_t{spec_.logs.route(Stream::kError, rank).is_kept};
    const uint64_t num_pipes = own_error_ || spec_.logs.has_files() ? 2 : 1;
    needed += kDescriptorsPerWorker + num_pipes + num_files;
  }
  if (needed <= limit) return {};
  return Error(ErrorCode::kUnavailable,
               cadre::format("{} workers need about {} descriptors and this process may open {}: "
                             "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd) or start "
                             "fewer workers",
                             spec_.num_workers, needed, limit));
}

void JobRun::log_binding() {
  if (spec_.log_level > LogLevel::kInfo) return;
  for (size_t rank = 0; rank < spec_.cores_of_rank.size(); ++rank) {
    say(cadre::format("rank {} is bound to cores {}", rank,
                      rank_ranges(spec_.cores_of_rank[rank])));
  }
}

void JobRun::identify() {
  identity_ = {
      .num_workers = spec_.num_workers,
      .run_id = spec_.run_id.empty() ? random_hex(system_, kRunIdBytes) : spec_.run_id,
      .job_id = random_hex(system_, sizeof(AgentId)),
      .role = spec_.role,
      .token = spec_.hosts ? spec_.hosts->token : os::Secret(random_hex(system_, kTokenBytes)),
      .error_folder = spec_.folder,
      .num_cores = system_.host().num_cores,
      .cores_of_rank = spec_.cores_of_rank,
      .max_restarts = spec_.max_restarts,
      .has_virtual_local_ranks = spec_.has_virtual_local_ranks};
}

// Opens a new store for each attempt, so that it contains no keys of an earlier attempt.
Status JobRun::open_store() {
  store_.reset();  // the next one may use the same port
  TcpStoreServerOptions options{.token = identity_.token, .log = &log_};
  options.address.port = spec_.store_port;
  auto store = TcpStoreServer::start(system_, options);
  if (!store.ok()) {
    const std::string remedy =
        spec_.store_port == 0 ? "" : "; choose another --master-port or leave it out";
    return Error(store.error().code(),
                 cadre::format("start the job's store: {}{}", store.error().message(), remedy));
  }
  store_ = *std::move(store);
  identity_.store_host = store_->address().host;
  identity_.store_port = store_->address().port;
  return {};
}

Status JobRun::start() {
  notice_signal_ = 0;
  WorkerGroup::KeptWorkers kept;
  if (attempt_) kept = attempt_->group().take_kept();
  attempt_.reset();  // its workers' output refers to log files, which begin_logs() closes
  CADRE_RETURN_IF_ERROR(begin_logs());
  num_memory_kills_before_ = os::count_memory_kills();
  attempt_.emplace(system_, output_, error_, spec_.stop_grace);
  if (fork_server_ && fork_server_->template_pid()) {
    attempt_->group().spare(*fork_server_->template_pid());
  }
  return attempt_->group().start(worker_specs(identity_), std::move(kept));
}

Result<int> JobRun::run() {
  CADRE_RETURN_IF_ERROR(raise_limits());
  identify();
  if (const Status opened = open_logs(); !opened.ok()) return opened.error();
  if (const Status opened = open_events(); !opened.ok()) return opened.error();
  log_binding();
  open_fork_server();
  return spec_.hosts ? run_rounds() : run_attempts();
}

Result<int> JobRun::run_attempts() {
  TimePoint restart_began = began_;
  while (true) {
    const TimePoint rendezvous_began = system_.now();
    if (const Status opened = open_store(); !opened.ok()) {
      say(opened.error().message());
      record({.state = "FAILED"});
      drain_outputs();
      return 1;
    }
    identity_.attempt = identity_.restart_count = restarts_.num_restarts();
    if (const Status started = start(); !started.ok()) {
      record({.state = "FAILED"});
      drain_outputs();
      return started.error();
    }
    record({.state = "RENDEZVOUS", .duration = system_.now() - rendezvous_began});
    if (identity_.restart_count > 0) {
      record({.state = "RESTART", .duration = system_.now() - restart_began});
    }
    record_starts();
    watch();
    attempt_->finish_output();
    record_ends();
    restart_began = system_.now();
    const auto failure = attempt_->group().first_failure();
    if (!will_restart()) return finish(failure);
    report(*failure, Deadline(system_.now()));
    failures_.push_back(*failure);
    if (!wait_to_restart(failure->lifetime)) return finish(std::nullopt);
  }
}

void JobRun::watch() {
  while (!attempt_->is_over()) {
    step(attempt_->next_due());
    attempt_->keep_waiting(may_keep_workers());
    attempt_->advance();
    // A worker that still connects may wait for one that has ended before it left a will. Without
    // the store its wait ends with an error.
    if (attempt_->awaits_survivors()) store_.reset();
  }
}

// Returns whether workers that wait for a new membership may get one.
bool JobRun::may_keep_workers() {
  if (!agent_) return will_restart();
  const bool is_last_failure =
      attempt_->group().first_failure() && identity_.restart_count >= spec_.max_restarts;
  return stop_signal_ == 0 && !guardian_is_gone_ && !end_ && !is_last_failure;
}

// Stops the workers that wait, because the job is over.
void JobRun::stop_kept_workers() {
  if (attempt_->group().kept_ranks().empty()) return;
  attempt_->keep_waiting(false);
  attempt_->ask_to_stop(SIGTERM);
  while (!attempt_->is_over()) {
    step(attempt_->next_due());
    attempt_->advance();
  }
  attempt_->finish_output();
}

// One iteration of the loop, which passes on output and handles signals.
void JobRun::step(Deadline wake) {
  std::array also{os::PollItem{.target = &signals_, .want_read = true},
                  os::PollItem{.target = &guardian_gone_, .want_read = !guardian_is_gone_},
                  os::PollItem{.target = &log_.pollable(), .want_read = !error_.is_full()},
                  os::PollItem{.target = agent_ ? &agent_->pollable() : &log_.pollable(),
                               .want_read = agent_ != nullptr}};
  attempt_->group().step(also, wake);
  if (also[1].can_read) {
    guardian_is_gone_ = true;
    attempt_->keep_waiting(false);
    attempt_->kill_all();
  }
  accept_template();
  show_log();
  say_lost_output();
  take_signals();
  if (agent_) take_orders();
}

// Forked workers have rank 0's arguments and read from /dev/null, so there is no fork server if the
// arguments contain the rank or a worker has the standard input. Without it, all workers are
// executed.
void JobRun::open_fork_server() {
  const bool names_rank = std::ranges::any_of(spec_.arguments, [](const std::string& argument) {
    return with_local_rank(argument, 0) != argument;
  });
  if (fork_server_ || spec_.max_restarts == 0 || names_rank || spec_.input_rank) return;
  auto server = os::ForkServer::listen(spec_.folder + "/fork");
  if (server.ok()) fork_server_ = *std::move(server);
}

void JobRun::accept_template() {
  if (!fork_server_ || fork_server_->template_pid() || attempt_->group().size() == 0) return;
  fork_server_->accept_template(attempt_->group().pid(rank_of(identity_, 0)), spec_.executable);
  if (const auto pid = fork_server_->template_pid()) attempt_->group().spare(*pid);
}

// Returns whether the workers are started again when the present attempt, which has failed, is
// over. A process that could not be killed prevents the restart, because it may hold a device or
// file that new workers need.
bool JobRun::will_restart() {
  const auto failure = attempt_->group().first_failure();
  return failure && restarts_.has_restart_left() && stop_signal_ == 0 && !guardian_is_gone_ &&
         attempt_->unkillable().empty() &&
         !exited_with_one_of(spec_.final_exit_codes, failure->status);
}

// Returns false if a signal or the guardian's end calls the restart off.
bool JobRun::wait_to_restart(Duration lifetime) {
  const Duration delay = restarts_.next_delay(lifetime);
  const std::vector<int> kept = attempt_->group().kept_ranks();
  const int num_workers = attempt_->group().size() - static_cast<int>(kept.size());
  say(cadre::format("restart {} of {}: starting {} worker{} again{}{}", restarts_.num_restarts(),
                    restarts_.max_restarts(), num_workers, num_workers == 1 ? "" : "s",
                    delay == Duration{}
                        ? ""
                        : cadre::format(" in {:g} s", std::chrono::duration<double>(delay).count()),
                    kept.empty()
                        ? ""
                        : cadre::format("; {} {} {} running", kept.size() == 1 ? "rank" : "ranks",
                                        rank_ranges(kept), kept.size() == 1 ? "stays" : "stay")));
  is_between_attempts_ = true;
  const Deadline due = system_.deadline_in(delay);
  bool is_due = false;
  while (!is_due && stop_signal_ == 0 && !guardian_is_gone_) {
    const bool is_suspended = attempt_->group().is_suspended();
    step(is_suspended ? system_.deadline_in(kSuspendedTick) : due);
    is_due = !attempt_->group().is_suspended() && due.has_passed(system_.now());
  }
  is_between_attempts_ = false;
  return stop_signal_ == 0 && !guardian_is_gone_;
}

// Prints the log lines of the store. If the reader of the output is slow, the lines stay in the
// log, whose size is limited.
void JobRun::show_log() {
  if (error_.is_full()) return;
  for (const std::string& line : log_.take()) say(line);
}

void JobRun::take_signals() {
  while (const auto signal = signals_.try_next()) {
    if (*signal == SIGCHLD) {
      attempt_->group().reap_orphans();
      say_stopped();
    } else if (*signal == SIGTSTP) {
      attempt_->group().suspend();
    } else if (*signal == SIGCONT) {
      attempt_->group().resume();
    } else if (std::ranges::count(spec_.stop_signals, *signal) > 0) {
      on_stop_signal(*signal);
    } else if (*signal == SIGUSR1 || *signal == SIGUSR2) {
      // Batch systems announce that the job's time limit is near with SIGUSR1 or SIGUSR2.
      if (notice_signal_ == 0 && stop_signal_ == 0) notice_signal_ = *signal;
      attempt_->group().forward_signal(*signal);
    } else {
      on_unhandled_signal(*signal);
    }
  }
}

void JobRun::say_stopped() {
  for (const StoppedWorker& worker : attempt_->group().take_stopped()) {
    say(
        cadre::format("rank {} (pid {}) was stopped by {} and does not run until it is continued "
                      "(kill -CONT {})",
                      worker.rank, worker.pid, os::signal_name(worker.signal), worker.pid));
  }
}

// Reports once that standard output, and once that a log file cannot be written. The job continues.
void JobRun::say_lost_output() {
  const std::vector<Error> lost = logs_ ? logs_->take_failures() : std::vector<Error>();
  if (!lost.empty() && num_lost_logs_ == 0) {
    say(cadre::format("{}; further output is not written to this log file",
                      lost.front().message()));
  }
  num_lost_logs_ += lost.size();
  if (const auto lost_event = events_ ? events_->take_failure() : std::nullopt) {
    say(cadre::format("{}; further events are not written to this file", lost_event->message()));
  }
  if (has_said_lost_output_ || !output_.failure()) return;
  has_said_lost_output_ = true;
  say(cadre::format("standard output: {}; further output on it is lost",
                    output_.failure()->message()));
}

void JobRun::on_stop_signal(int signal) {
  using State = Attempt::Phase;
  if (agent_) agent_->leave();
  const TimePoint now = system_.now();
  const bool is_repeated = stop_signal_ != 0 && now - last_stop_signal_ < kSameKeyPress;
  last_stop_signal_ = now;
  const State phase = attempt_->phase();
  if (is_between_attempts_ || will_restart()) {
    stop_signal_ = signal;
    is_restart_called_off_ = !agent_;
    say(cadre::format("{}: {}", os::signal_name(signal),
                      agent_ ? "this host leaves the job" : "the workers are not started again"));
  } else if (phase == State::kRunning || phase == State::kLeaving || phase == State::kRecovering ||
             phase == State::kLingering) {
    stop_signal_ = signal;
    attempt_->keep_waiting(false);
    const int num_workers = attempt_->group().size();
    say(cadre::format("{}: asked {} worker{} to stop, for at most {:.0f} s{}",
                      os::signal_name(signal), num_workers, num_workers == 1 ? "" : "s",
                      std::chrono::duration<double>(spec_.stop_grace).count(),
                      signal == SIGINT ? "; Ctrl-C again kills them at once" : ""));
    attempt_->ask_to_stop(signal);
  } else if (signal == SIGINT && !is_repeated && phase == State::kStopping) {
    if (stop_signal_ == 0) stop_signal_ = signal;
    say("Ctrl-C again: killing what is left");
    attempt_->kill_all();
  }
}

// Ends the job as the default action of the signal would end a process.
void JobRun::on_unhandled_signal(int signal) {
  if (agent_) agent_->leave();
  const bool is_called_off = !agent_ && (is_between_attempts_ || will_restart());
  if (stop_signal_ == 0) stop_signal_ = signal;
  is_restart_called_off_ = is_restart_called_off_ || is_called_off;
  say(cadre::format("{}, which --signals-to-handle does not name: killing the workers",
                    os::signal_name(signal)));
  attempt_->keep_waiting(false);
  attempt_->kill_all();
}

// Says in one line which failures led to restarts, if there were any.
void JobRun::say_restarts(const std::optional<WorkerExit>& failure) {
  if (failures_.empty() || guardian_is_gone_) return;
  std::string outcome = failure ? "failed" : preemption_code_ ? "preempted" : "succeeded";
  if (is_restart_called_off_ || (!failure && !preemption_code_ && stop_signal_ != 0)) {
    outcome = "stopped by " + os::signal_name(stop_signal_);
  }
  const int num_restarts = identity_.restart_count;
  say(cadre::format("{} after {} restart{}; earlier failures: {}", outcome, num_restarts,
                    num_restarts == 1 ? "" : "s", failures_text(failures_)));
}

int JobRun::exit_code(const std::optional<WorkerExit>& failure) const {
  if (guardian_is_gone_) return 128 + SIGKILL;
  if (is_restart_called_off_) return 128 + stop_signal_;
  if (failure) return failure->status.shell_code();
  if (preemption_code_.value_or(0) != 0) return *preemption_code_;
  if (stop_signal_ != 0) return 128 + stop_signal_;
  const bool has_lost_output = output_.failure() || error_.failure() ||
                               (logs_ && logs_->has_failed()) || (events_ && events_->has_failed());
  return attempt_->unkillable().empty() && !has_lost_output && !preemption_code_ ? 0 : 1;
}

JobFailure JobRun::failure_for_caller(const WorkerExit& failure) const {
  return {.first = failure,
          .host = system_.host().name,
          .num_workers = world_size(identity_),
          .worker_file = error_path_of(failure.rank),
          .last_lines = attempt_->group().tail(failure.rank).lines(),
          .timestamp_s = os::wall_clock_seconds()};
}

// Writes the failure to TORCHELASTIC_ERROR_FILE if this launcher is itself a worker of torchrun or
// of another launcher.
void JobRun::leave_for_caller(const WorkerExit& failure) {
  const std::string path = spec_.environment.get_or("TORCHELASTIC_ERROR_FILE", "");
  if (path.empty()) return;
  const Status written = write_error_file(path, failure_for_caller(failure));
  if (!written.ok()) {
    say("the caller's TORCHELASTIC_ERROR_FILE: " + written.error().message());
  }
}

// Reads the crash of the worker, and adds it to the worker's error file.
std::optional<CrashReport> JobRun::crash_of(const WorkerExit& failure) {
  const std::string error_file = error_path_of(failure.rank);
  auto crash = read_crash(system_, error_file, spec_.command, spec_.environment);
  if (!crash) return crash;
  if (const Status added = add_crash(error_file, *crash); !added.ok()) {
    say("the stack of the crash: " + added.error().message());
  }
  return crash;
}

// Prints the report of the failure. Waits before it until standard output is written or `drained`
// has passed.
void JobRun::report(const WorkerExit& failure, Deadline drained) {
  if (exited_with_one_of(spec_.reported_exit_codes, failure.status)) return;
  // The terminal may show an unfinished progress line of rank 0.
  if (output_.is_terminal() && !output_.is_at_line_start()) output_.append("\n");
  output_.drain(system_, drained);
  if (spec_.on_failure) {
    crash_of(failure);  // adds the crash to the worker's error file
    return spec_.on_failure(failure.rank, sentence_of(failure_for_caller(failure)));
  }
  const std::string exception = exception_in(error_path_of(failure.rank));
  const WorkerGroup& group = attempt_->group();
  error_.append_line(
      "", to_text({.failure = failure,
                   .host = system_.host().name,
                   .exception = exception,
                   .crash = crash_of(failure),
                   .last_lines = group.tail(failure.rank).lines(),
                   .num_lines_just_shown = group.tail(failure.rank).num_just_shown(error_),
                   .num_workers = world_size(identity_),
                   .exits = group.exits(),
                   .num_oom_kills = os::count_memory_kills() - num_memory_kills_before_,
                   .outlived = attempt_->outlived(),
                   .grace = attempt_->grace(),
                   .log_folder = log_folder_of(failure.rank)}));
}

// Says whether all workers have saved the same step, if they began to leave, and tells the caller
// if this launcher is itself a worker.
void JobRun::conclude_preemption(const std::optional<WorkerExit>& failure) {
  if (failure || is_restart_called_off_ || guardian_is_gone_) return;
  const auto has_asked = [&](Rank rank) {
    return read_preemption_file(error_path_of(rank)).has_value();
  };
  std::vector<LeavingWorker> workers;
  for (const WorkerExit& ended : attempt_->group().exits()) {
    workers.push_back({.exit = ended, .has_asked = has_asked(ended.rank)});
  }
  for (const int rank : attempt_->group().running_ranks()) {
    workers.push_back({.exit = {.rank = rank}, .has_asked = has_asked(rank), .has_ended = false});
  }
  const PreemptionReport report{.signal = notice_signal_ != 0 ? notice_signal_ : stop_signal_,
                                .workers = workers};
  if (!report.has_begun()) return;
  const auto saved = report.saved_by_all();
  preemption_code_ = saved ? saved->exit_code : 0;
  say(report.to_text());
  const std::string caller = spec_.environment.get_or("TORCHELASTIC_ERROR_FILE", "");
  if (!saved || caller.empty()) return;
  const std::string text = encode_preemption_file(*saved);
  const Status written = os::replace_file(std::string(caller).append(kPreemptionFileSuffix),
                                          std::as_bytes(std::span(text)));
  if (!written.ok()) say("the caller's preemption file: " + written.error().message());
}

void JobRun::drain_outputs() {
  const Deadline drained = system_.deadline_in(kDrainTimeout);
  output_.drain(system_, drained);
  say_lost_output();
  error_.drain(system_, drained);
}

int JobRun::finish(const std::optional<WorkerExit>& failure) {
  stop_kept_workers();
  for (const std::string& line : log_.take_last()) say(line);
  conclude_preemption(failure);
  say_restarts(failure);
  if (failure) {
    report(*failure, system_.deadline_in(kDrainTimeout));
    leave_for_caller(*failure);
  }
  if (num_lost_logs_ > 1) {
    say(cadre::format("{} log files are incomplete, because they could not be written",
                      num_lost_logs_));
  }
  attempt_->say_unkillable();
  if (guardian_is_gone_) say("`cadre run` was killed; its workers were killed too");
  record({.state = exit_code(failure) == 0 ? "SUCCEEDED" : "FAILED"});
  drain_outputs();
  return exit_code(failure);
}

Result<int> run_job(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone) {
  std::unique_ptr<os::ForkServer> fork_server;
  if (spec.worker_main) {  // a JobRun starts threads and blocks signals
    auto started = os::ForkServer::start(spec.worker_main);
    if (!started.ok()) return started.error();
    fork_server = *std::move(started);
  }
  JobRun run(system, spec, guardian_gone, std::move(fork_server));
  return run.run();
}

}  // namespace cadre::launch
