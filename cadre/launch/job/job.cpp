#include "cadre/launch/job/job.h"

#include <signal.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/descriptor_limit.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/os/proc/descendants.h"
#include "cadre/core/os/proc/machine.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/launch/job/error_file.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/failure_report.h"
#include "cadre/launch/job/line_prefix.h"
#include "cadre/launch/job/queued_log.h"
#include "cadre/launch/job/worker_environment.h"
#include "cadre/launch/job/worker_group.h"

namespace cadre::launch {
namespace {

constexpr std::array kSignals{SIGINT,  SIGTERM, SIGHUP,  SIGQUIT, SIGUSR1,
                              SIGUSR2, SIGTSTP, SIGCONT, SIGCHLD};
// Two signals within this time count as one: people do not press Ctrl-C so quickly, but programs
// such as timeout(1) send two at once.
constexpr Duration kSameKeyPress = std::chrono::milliseconds(100);
// The time in which processes that workers left running may end by themselves (as Python's do).
constexpr Duration kLinger = std::chrono::milliseconds(500);
// The time that they have after SIGTERM.
constexpr Duration kLeftoverGrace = std::chrono::seconds(5);
constexpr Duration kKillTimeout = std::chrono::seconds(5);
constexpr Duration kDrainTimeout = std::chrono::seconds(5);
constexpr Duration kTick = std::chrono::seconds(1);
// The interval of killing, which finds processes that were forked meanwhile.
constexpr Duration kKillTick = std::chrono::milliseconds(20);
// The descriptors of a worker besides one or two pipes: a pidfd and a connection to the store.
constexpr uint64_t kDescriptorsPerWorker = 2;
// The launcher's own descriptors: outputs, signals, the store's listener, and those used while it
// starts a worker.
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

std::string names_of(std::span<const os::Descendant> processes) {
  std::string text;
  for (const os::Descendant& process : processes) {
    text += cadre::format("{}{} (pid {})", text.empty() ? "" : ", ", process.name, process.pid);
  }
  return text;
}

class JobRun {
 public:
  JobRun(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone)
      : system_(system),
        spec_(spec),
        guardian_gone_(guardian_gone),
        signals_(kSignals),
        log_(system, spec.log_level),
        group_(system, output_, error_),
        phase_deadline_(system.now()),
        say_waiting_at_(system.now()) {}

  Result<int> run();

 private:
  // All phases except the first end at phase_deadline_.
  enum class Phase {
    kRunning,
    kLingering,  // the workers have ended; their other processes may end by themselves
    kStopping,   // SIGTERM was sent to everything
    kKilling     // everything is being killed
  };

  Status raise_limits();
  Status open_store();
  Status start();
  std::vector<WorkerSpec> worker_specs(const JobIdentity& identity);
  std::string prefix_of(Rank rank) const;
  void watch();
  void take_signals();
  void on_stop_signal(int signal);
  void ask_to_stop(int signal);
  void wait_for_stop();
  void say_waiting();
  void kill_outlived();
  void kill_all();
  bool is_over();
  void advance();
  void say(std::string_view line) { error_.append_line("cadre: ", line); }
  void say_stopped();
  void say_lost_output();
  void say_unkillable();
  void show_log();
  int finish();
  void leave_for_caller(const WorkerExit& failure);
  int exit_code(const std::optional<WorkerExit>& failure) const;
  bool has_reported(const os::ExitStatus& status) const;

  void enter(Phase phase, Duration limit) {
    phase_ = phase;
    phase_deadline_ = system_.deadline_in(limit);
  }

  os::System& system_;
  const JobSpec& spec_;
  os::Pollable& guardian_gone_;
  // Must be constructed before every member that starts a thread.
  os::SignalListener signals_;
  BufferedOutput output_{os::OutputStream::Target::kStandardOutput};
  const std::unique_ptr<BufferedOutput> own_error_ =
      os::outputs_are_one()
          ? nullptr
          : std::make_unique<BufferedOutput>(os::OutputStream::Target::kStandardError);
  BufferedOutput& error_ = own_error_ ? *own_error_ : output_;
  QueuedLog log_;
  std::unique_ptr<TcpStoreServer> store_;
  WorkerGroup group_;
  JobIdentity identity_;
  uint64_t num_memory_kills_before_ = 0;

  Phase phase_ = Phase::kRunning;
  Deadline phase_deadline_;
  TimePoint last_stop_signal_;
  os::SoftLimits worker_limits_;
  bool has_said_lost_output_ = false;
  int stop_signal_ = 0;  // the first signal that stopped the job; 0 if none did
  bool guardian_is_gone_ = false;
  std::vector<os::Descendant> unkillable_;

  // The state of the phase kStopping, up to outlived_.
  std::string grace_;  // for example "30 s of SIGTERM"
  Deadline say_waiting_at_;
  bool has_said_ranks_ = false;
  bool has_asked_leftovers_ = false;
  bool has_said_leftovers_ = false;
  std::vector<int> outlived_;  // the ranks that had to be killed
};

std::string JobRun::prefix_of(Rank rank) const {
  const std::string prefix = line_prefix(
      spec_.prefix_template, {.rank = rank, .role = spec_.role, .host = system_.host().name});
  return spec_.colour_prefix && !prefix.empty() ? coloured(prefix, rank) : prefix;
}

std::vector<WorkerSpec> JobRun::worker_specs(const JobIdentity& identity) {
  std::vector<WorkerSpec> specs;
  for (int rank = 0; rank < spec_.num_workers; ++rank) {
    os::ProcessOptions process{
        .executable = spec_.executable,
        .environment = worker_environment(spec_.environment, identity, rank).to_texts(),
        .ignored_signals = signals_ignored_by_workers(spec_.inherited.ignored_signals),
        .soft_limits = worker_limits_};
    for (const std::string& argument : spec_.arguments) {
      process.arguments.push_back(with_local_rank(argument, rank));
    }
    specs.push_back(
        {.rank = rank,
         .process = std::move(process),
         .output = {.prefix = prefix_of(rank), .is_raw = spec_.is_rank0_raw && rank == 0}});
  }
  return specs;
}

Status JobRun::raise_limits() {
  worker_limits_ = spec_.inherited.limits;
  worker_limits_.descriptors = os::raise_descriptor_limit().soft;
  const uint64_t limit = os::descriptor_limit().soft;
  const uint64_t num_pipes = own_error_ ? 2 : 1;
  const uint64_t needed =
      static_cast<uint64_t>(spec_.num_workers) * (kDescriptorsPerWorker + num_pipes) +
      kOwnDescriptors;
  if (needed <= limit) return {};
  return Error(ErrorCode::kUnavailable,
               cadre::format("{} workers need about {} descriptors and this process may open {}: "
                             "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd) or start "
                             "fewer workers",
                             spec_.num_workers, needed, limit));
}

Status JobRun::open_store() {
  identity_ = {.num_workers = spec_.num_workers,
               .run_id = spec_.run_id.empty() ? random_hex(system_, kRunIdBytes) : spec_.run_id,
               .role = spec_.role,
               .token = random_hex(system_, kTokenBytes),
               .error_folder = spec_.folder,
               .num_cores = system_.host().num_cores};
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
  num_memory_kills_before_ = os::count_memory_kills();
  return group_.start(worker_specs(identity_));
}

Result<int> JobRun::run() {
  CADRE_RETURN_IF_ERROR(raise_limits());
  if (const Status opened = open_store(); !opened.ok()) {
    say(opened.error().message());
    error_.drain(system_, system_.deadline_in(kDrainTimeout));
    return 1;
  }
  CADRE_RETURN_IF_ERROR(start());
  watch();
  return finish();
}

void JobRun::watch() {
  while (!is_over()) {
    std::array also{os::PollItem{.target = &signals_, .want_read = true},
                    os::PollItem{.target = &guardian_gone_, .want_read = !guardian_is_gone_},
                    os::PollItem{.target = &log_.pollable(), .want_read = !error_.is_full()}};
    Deadline wake = system_.deadline_in(phase_ == Phase::kKilling ? kKillTick : kTick);
    if (phase_ != Phase::kRunning) wake = wake.earlier(phase_deadline_);
    group_.step(also, wake);
    if (also[1].can_read) {
      guardian_is_gone_ = true;
      kill_all();
    }
    show_log();
    say_lost_output();
    take_signals();
    advance();
  }
}

// If the reader of the output is slow, lines stay in the log, whose size is limited.
void JobRun::show_log() {
  if (error_.is_full()) return;
  for (const std::string& line : log_.take()) say(line);
}

void JobRun::take_signals() {
  while (const auto signal = signals_.try_next()) {
    if (*signal == SIGCHLD) {
      group_.reap_orphans();
      say_stopped();
    } else if (*signal == SIGTSTP) {
      group_.suspend();
    } else if (*signal == SIGCONT) {
      group_.resume();
    } else if (*signal == SIGUSR1 || *signal == SIGUSR2) {
      group_.forward_signal(*signal);  // batch systems announce the time limit with these signals
    } else {
      on_stop_signal(*signal);
    }
  }
}

void JobRun::say_stopped() {
  for (const StoppedWorker& worker : group_.take_stopped()) {
    say(
        cadre::format("rank {} (pid {}) was stopped by {} and does not run until it is continued "
                      "(kill -CONT {})",
                      worker.rank, worker.pid, os::signal_name(worker.signal), worker.pid));
  }
}

// The loss is reported once, and the job continues.
void JobRun::say_lost_output() {
  if (has_said_lost_output_ || !output_.failure()) return;
  has_said_lost_output_ = true;
  say(cadre::format("standard output: {}; what follows on it is lost",
                    output_.failure()->message()));
}

void JobRun::on_stop_signal(int signal) {
  const TimePoint now = system_.now();
  const bool is_repeated = stop_signal_ != 0 && now - last_stop_signal_ < kSameKeyPress;
  last_stop_signal_ = now;
  if (phase_ == Phase::kRunning || phase_ == Phase::kLingering) {
    stop_signal_ = signal;
    say(cadre::format("{}: asked {} worker{} to stop, for at most {:.0f} s{}",
                      os::signal_name(signal), group_.size(), group_.size() == 1 ? "" : "s",
                      std::chrono::duration<double>(spec_.stop_grace).count(),
                      signal == SIGINT ? "; Ctrl-C again kills them at once" : ""));
    ask_to_stop(signal);
  } else if (signal == SIGINT && !is_repeated && phase_ == Phase::kStopping) {
    if (stop_signal_ == 0) stop_signal_ = signal;
    say("Ctrl-C again: killing what is left");
    kill_all();
  }
}

std::string grace_text(Duration grace, int signal) {
  return cadre::format("{:g} s of {}", std::chrono::duration<double>(grace).count(),
                       os::signal_name(signal));
}

void JobRun::ask_to_stop(int signal) {
  group_.ask_to_stop(signal);
  enter(Phase::kStopping, spec_.stop_grace);
  grace_ = grace_text(spec_.stop_grace, signal);
  say_waiting_at_ = system_.deadline_in(kTick);
}

// Processes that workers left running are stopped last, because workers may need them until they
// have ended.
void JobRun::wait_for_stop() {
  if (phase_deadline_.has_passed(system_.now())) return kill_outlived();
  if (group_.all_ended()) {
    group_.ask_leftovers_to_stop();
    if (!std::exchange(has_asked_leftovers_, true)) say_waiting_at_ = system_.deadline_in(kTick);
  }
  if (say_waiting_at_.has_passed(system_.now())) say_waiting();
}

// If stopping takes long, says which rank failed and which processes have not ended.
void JobRun::say_waiting() {
  const auto failure = group_.first_failure();
  const std::vector<int> ranks = group_.running_ranks();
  std::string awaited;
  if (!ranks.empty()) {
    if (!failure || std::exchange(has_said_ranks_, true)) return;
    awaited = cadre::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", rank_ranges(ranks));
  } else {
    const auto leftovers = os::list_descendants();
    if (leftovers.empty() || std::exchange(has_said_leftovers_, true)) return;
    awaited = names_of(leftovers);
  }
  const std::string reason =
      failure ? cadre::format("rank {} failed with {}", failure->rank, exit_name(failure->status))
              : "the workers have ended";
  say(cadre::format("{}; waiting for {} to end, killed if not within {}", reason, awaited, grace_));
}

void JobRun::kill_outlived() {
  outlived_ = group_.running_ranks();
  std::string killed;
  if (!outlived_.empty()) {
    killed =
        cadre::format("{} {}", outlived_.size() == 1 ? "rank" : "ranks", rank_ranges(outlived_));
  }
  const auto leftovers =
      group_.all_ended() ? os::list_descendants() : std::vector<os::Descendant>();
  if (!leftovers.empty()) killed += names_of(leftovers);
  const size_t num_killed = outlived_.size() + leftovers.size();
  if (num_killed > 0) {
    say(cadre::format("killed, because {} did not end within {}: {}",
                      num_killed == 1 ? "it" : "they", grace_, killed));
  }
  kill_all();
}

void JobRun::kill_all() {
  if (phase_ != Phase::kKilling) enter(Phase::kKilling, kKillTimeout);
  group_.ask_to_stop(SIGKILL);
  os::signal_processes(os::list_descendants(), SIGKILL);
}

bool JobRun::is_over() {
  if (group_.all_ended() && !os::has_children()) return true;
  if (phase_ != Phase::kKilling) return false;
  std::vector<os::Descendant> left = os::list_descendants();
  const bool is_hopeless = !left.empty() && std::ranges::none_of(left, os::may_signal);
  if (!is_hopeless && !phase_deadline_.has_passed(system_.now())) return false;
  unkillable_ = std::move(left);
  return true;
}

// Enters the next phase when it is due.
void JobRun::advance() {
  if (phase_ == Phase::kRunning) {
    if (group_.first_failure()) {
      ask_to_stop(SIGTERM);
      wait_for_stop();  // called here, because no event may wake the loop in time
    } else if (group_.all_ended()) {
      enter(Phase::kLingering, kLinger);
    }
    return;
  }
  if (phase_ == Phase::kKilling) return kill_all();
  if (phase_ == Phase::kStopping) return wait_for_stop();
  if (!phase_deadline_.has_passed(system_.now())) return;
  const auto leftovers = os::list_descendants();
  if (leftovers.empty()) return group_.reap_orphans();
  say(cadre::format("the workers have ended; stopping what they left running: {}",
                    names_of(leftovers)));
  group_.ask_leftovers_to_stop();
  has_asked_leftovers_ = true;
  has_said_leftovers_ = true;
  grace_ = grace_text(kLeftoverGrace, SIGTERM);
  enter(Phase::kStopping, kLeftoverGrace);
}

void JobRun::say_unkillable() {
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

int JobRun::exit_code(const std::optional<WorkerExit>& failure) const {
  if (guardian_is_gone_) return 128 + SIGKILL;
  if (failure) return failure->status.shell_code();
  if (stop_signal_ != 0) return 128 + stop_signal_;
  return unkillable_.empty() && !output_.failure() && !error_.failure() ? 0 : 1;
}

// Returns whether the worker has explained its failure on standard error.
bool JobRun::has_reported(const os::ExitStatus& status) const {
  return status.is_known && status.signal == 0 &&
         std::ranges::find(spec_.reported_exit_codes, status.code) !=
             spec_.reported_exit_codes.end();
}

// Writes the error file if this launcher is itself a worker of torchrun or of another launcher.
void JobRun::leave_for_caller(const WorkerExit& failure) {
  const std::string path = spec_.environment.get_or("TORCHELASTIC_ERROR_FILE", "");
  if (path.empty()) return;
  const Status written =
      write_error_file(path, {.first = failure,
                              .host = system_.host().name,
                              .num_workers = group_.size(),
                              .worker_file = error_file_of(identity_, failure.rank),
                              .last_lines = group_.tail(failure.rank).lines(),
                              .timestamp_s = os::wall_clock_seconds()});
  if (!written.ok()) {
    say("the caller's TORCHELASTIC_ERROR_FILE: " + written.error().message());
  }
}

int JobRun::finish() {
  const Deadline drained = system_.deadline_in(kDrainTimeout);
  // A process that could not be killed keeps its pipe open.
  const Deadline ended = unkillable_.empty() ? drained : system_.deadline_in(kLinger);
  while (!group_.output_has_ended() && !ended.has_passed(system_.now())) {
    group_.step({}, ended);
  }
  group_.finish_output();
  for (const std::string& line : log_.take_last()) say(line);

  const auto failure = group_.first_failure();
  if (failure && !has_reported(failure->status)) {
    // The terminal may show an unfinished progress line of rank 0.
    if (output_.is_terminal() && !output_.is_at_line_start()) output_.append("\n");
    output_.drain(system_, drained);
    error_.append_line(
        "", to_text({.failure = *failure,
                     .host = system_.host().name,
                     .exception = exception_in(error_file_of(identity_, failure->rank)),
                     .last_lines = group_.tail(failure->rank).lines(),
                     .num_lines_just_shown = group_.tail(failure->rank).num_just_shown(error_),
                     .num_workers = group_.size(),
                     .exits = group_.exits(),
                     .num_oom_kills = os::count_memory_kills() - num_memory_kills_before_,
                     .outlived = outlived_,
                     .grace = grace_}));
  }
  if (failure) leave_for_caller(*failure);
  say_unkillable();
  if (guardian_is_gone_) say("`cadre run` was killed; its workers were killed too");
  output_.drain(system_, drained);
  say_lost_output();
  error_.drain(system_, drained);
  return exit_code(failure);
}

}  // namespace

Result<int> run_job(os::System& system, const JobSpec& spec, os::Pollable& guardian_gone) {
  JobRun run(system, spec, guardian_gone);
  return run.run();
}

}  // namespace cadre::launch
