#include "cadre/launch/job/worker_group.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/recovery/recovery_files.h"
#include "cadre/launch/job/preemption_report.h"
#include "cadre/launch/job/worker_environment.h"

namespace cadre::launch {
namespace {

constexpr size_t kChunkBytes = 64 << 10;
constexpr Duration kProgressPeriod = std::chrono::seconds(1);
// suspend() needs one round, and further rounds only while processes fork.
constexpr int kMaxSuspendRounds = 100;

Result<std::unique_ptr<os::Process>> start_process(const os::ProcessOptions& options,
                                                   os::ForkServer* fork_server) {
  if (fork_server != nullptr && fork_server->is_ready()) {
    auto forked = fork_server->fork_process(options);
    if (forked.ok() || options.executable.empty()) return forked;
  }
  return os::Process::start(options);
}

// Returns the worker's preemption file if it names a saved step and the code with which the worker
// has ended.
std::optional<PreemptionFile> preemption_of(const os::ExitStatus& status,
                                            const std::string& error_file) {
  if (!status.is_known || status.signal != 0 || status.code == 0) return std::nullopt;
  const auto file = read_preemption_file(error_file);
  return file && file->saved_step && file->exit_code == status.code ? file : std::nullopt;
}

// Gives a worker that waits the place that a new process would have got as variables.
Status give_membership(const std::string& recovery_file, uint64_t number,
                       std::span<const std::string> environment) {
  MembershipFile file{.number = number, .variables = {}};
  for (const std::string& text : environment) {
    const std::string name = text.substr(0, text.find('='));
    if (std::ranges::find(kMembershipVariables, name) == kMembershipVariables.end()) continue;
    file.variables.emplace_back(name, text.substr(name.size() + 1));
  }
  const std::string text = encode_membership_file(file);
  return os::replace_file(std::string(recovery_file).append(kMembershipFileSuffix),
                          std::as_bytes(std::span(text)));
}

}  // namespace

struct WorkerGroup::Worker {
  Rank rank;
  std::unique_ptr<os::Process> process;
  std::optional<WorkerOutput> output;
  TimePoint started;
  bool output_is_open = true;
  bool error_is_open = true;
  bool has_ended = false;
  bool was_asked_to_stop = false;
  int stopped_by = 0;  // the stop signal at the last check; 0: none
  std::string error_file;
  std::string recovery_file;
  uint64_t num_memberships = 0;               // that the worker was given after failures
  std::optional<RecoveryFile> recovery = {};  // as read_recovery_files() has read it

  bool can_wait() const { return recovery && recovery->comes_within.count() > 0; }

  void pump(Bytes buffer, TimePoint now) {
    output_is_open =
        output_is_open && output->pump(Stream::kOutput, process->standard_output(), buffer, now);
    error_is_open =
        error_is_open && output->pump(Stream::kError, process->standard_error(), buffer, now);
  }
};

WorkerGroup::KeptWorkers::KeptWorkers() = default;
WorkerGroup::KeptWorkers::~KeptWorkers() = default;
WorkerGroup::KeptWorkers::KeptWorkers(KeptWorkers&& other) noexcept = default;
WorkerGroup::KeptWorkers& WorkerGroup::KeptWorkers::operator=(KeptWorkers&& other) noexcept =
    default;

WorkerGroup::WorkerGroup(os::System& system, BufferedOutput& output, BufferedOutput& error)
    : system_(system),
      output_(output),
      error_(error),
      buffer_(kChunkBytes),
      last_progress_(system.now()) {}

WorkerGroup::~WorkerGroup() = default;

Result<std::unique_ptr<WorkerGroup::Worker>> WorkerGroup::start_worker(const WorkerSpec& spec) {
  os::ProcessOptions options = spec.process;
  options.joins_output = &output_ == &error_ && spec.output.may_join();
  auto process = start_process(options, spec.fork_server);
  if (!process.ok()) return process.error();
  return std::make_unique<Worker>(Worker{.rank = spec.rank,
                                         .process = *std::move(process),
                                         .output = WorkerOutput(spec.output, output_, error_),
                                         .started = system_.now(),
                                         .error_is_open = !options.joins_output,
                                         .error_file = spec.error_file,
                                         .recovery_file = spec.recovery_file});
}

Status WorkerGroup::start(std::span<const WorkerSpec> specs, KeptWorkers kept) {
  kept.workers_.resize(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    const WorkerSpec& spec = specs[i];
    std::unique_ptr<Worker> worker = std::move(kept.workers_[i]);
    if (worker != nullptr) {
      const Status given = give_membership(worker->recovery_file, ++worker->num_memberships,
                                           spec.process.environment);
      if (given.ok()) {
        worker->rank = spec.rank;
        worker->output.emplace(spec.output, output_, error_);
        worker->started = system_.now();
        worker->recovery.reset();
        workers_.push_back(std::move(worker));
        continue;
      }
      worker.reset();  // kills the worker, which cannot learn its place
    }
    auto started = start_worker(spec);
    if (!started.ok()) {
      workers_.clear();  // kills the workers that were started
      return started.error();
    }
    workers_.push_back(*std::move(started));
  }
  return {};
}

bool WorkerGroup::is_kept(const Worker& worker) const {
  return keeps_waiting_ && !worker.has_ended && !worker.was_asked_to_stop && worker.recovery &&
         worker.recovery->is_waiting && worker.recovery->num_memberships == worker.num_memberships;
}

std::vector<int> WorkerGroup::spared() const {
  std::vector<int> pids = spared_;
  for (const auto& worker : workers_) {
    if (is_kept(*worker)) pids.push_back(worker->process->pid());
  }
  return pids;
}

void WorkerGroup::read_recovery_files() {
  for (const auto& worker : workers_) {
    worker->recovery.reset();
    if (worker->has_ended) continue;
    const auto content = os::read_file(worker->recovery_file, kMaxRecoveryFileBytes);
    if (content.ok()) worker->recovery = parse_recovery_file(*content);
  }
}

std::optional<Duration> WorkerGroup::recovery_time() const {
  std::optional<Duration> longest;
  for (const auto& worker : workers_) {
    if (worker->has_ended || !worker->can_wait()) continue;
    const Duration own = worker->recovery->comes_within;
    longest = std::max(longest.value_or(own), own);
  }
  return longest;
}

// A worker whose file cannot be written notices the loss itself, if later.
void WorkerGroup::name_lost_ranks(std::span<const RankRange> ranks) {
  if (ranks.empty()) return;
  read_recovery_files();
  for (const auto& worker : workers_) {
    if (worker->has_ended || !worker->can_wait()) continue;
    const std::string text = encode_lost_ranks_file(
        {.num_memberships = worker->num_memberships, .ranks = {ranks.begin(), ranks.end()}});
    static_cast<void>(
        os::replace_file(std::string(worker->recovery_file).append(kLostRanksFileSuffix),
                         std::as_bytes(std::span(text))));
  }
}

bool WorkerGroup::all_settled() const {
  return std::ranges::all_of(
      workers_, [this](const auto& worker) { return worker->has_ended || is_kept(*worker); });
}

std::vector<int> WorkerGroup::kept_ranks() const {
  std::vector<int> ranks;
  for (const auto& worker : workers_) {
    if (is_kept(*worker)) ranks.push_back(worker->rank);
  }
  return ranks;
}

WorkerGroup::KeptWorkers WorkerGroup::take_kept() {
  collect_exits();
  read_recovery_files();
  KeptWorkers kept;
  for (auto& worker : workers_) {
    const bool is_taken = is_kept(*worker);
    if (is_taken) worker->output->finish();
    kept.workers_.push_back(is_taken ? std::move(worker) : nullptr);
  }
  std::erase(workers_, nullptr);
  return kept;
}

std::vector<os::PollItem> WorkerGroup::poll_items(std::span<const os::PollItem> also) {
  std::vector<os::PollItem> items(also.begin(), also.end());
  const TimePoint now = system_.now();
  for (const auto& worker : workers_) {
    if (!worker->has_ended) {
      items.push_back({.target = &worker->process->exit_event(), .want_read = true});
    }
    if (worker->output_is_open && worker->output->has_room(Stream::kOutput, now)) {
      items.push_back({.target = &worker->process->standard_output(), .want_read = true});
    }
    if (worker->error_is_open && worker->output->has_room(Stream::kError, now)) {
      items.push_back({.target = &worker->process->standard_error(), .want_read = true});
    }
  }
  for (BufferedOutput* sink : sinks()) {
    if (!sink->is_empty()) items.push_back({.target = &sink->pollable(), .want_write = true});
  }
  return items;
}

Deadline WorkerGroup::next_due() const {
  const TimePoint now = system_.now();
  Deadline due(now + kProgressPeriod);
  for (const auto& worker : workers_) {
    if (const auto own = worker->output->next_due(now)) due = due.earlier(Deadline(*own));
  }
  return due;
}

std::vector<BufferedOutput*> WorkerGroup::sinks() {
  if (&output_ == &error_) return {&output_};
  return {&output_, &error_};
}

void WorkerGroup::step(std::span<os::PollItem> also, Deadline deadline) {
  std::vector<os::PollItem> items = poll_items(also);
  system_.poll(items, deadline.earlier(next_due()));
  std::copy_n(items.begin(), also.size(), also.begin());

  const TimePoint now = system_.now();
  const bool shows_progress = now - last_progress_ >= kProgressPeriod;
  if (shows_progress) last_progress_ = now;
  for (const auto& worker : workers_) {
    worker->pump(buffer_, now);
    worker->output->show_unfinished(now);
    if (shows_progress) worker->output->show_progress(now);
  }
  collect_exits();
  for (BufferedOutput* sink : sinks()) sink->flush();
}

void WorkerGroup::collect_exits() {
  const size_t before = exits_.size();
  for (const auto& worker : workers_) {
    if (worker->has_ended) continue;
    const auto status = worker->process->try_wait();
    if (!status) continue;
    worker->has_ended = true;
    exits_.push_back({.rank = worker->rank,
                      .pid = worker->process->pid(),
                      .status = *status,
                      .lifetime = system_.now() - worker->started,
                      .was_asked_to_stop = worker->was_asked_to_stop,
                      .stopped_by = worker->was_asked_to_stop ? worker->stopped_by : 0,
                      .preemption = preemption_of(*status, worker->error_file)});
  }
  // Exits by a signal are sorted before other exits that were noticed at the same time, because
  // they are the likely cause: when a worker crashes, its peers notice the broken connection and
  // exit within the same millisecond.
  std::stable_sort(exits_.begin() + static_cast<std::ptrdiff_t>(before), exits_.end(),
                   [](const WorkerExit& a, const WorkerExit& b) {
                     return (a.status.signal != 0) > (b.status.signal != 0);
                   });
}

std::vector<int> WorkerGroup::running_ranks() const {
  std::vector<int> ranks;
  for (const auto& worker : workers_) {
    if (!worker->has_ended && !is_kept(*worker)) ranks.push_back(worker->rank);
  }
  return ranks;
}

std::optional<WorkerExit> WorkerGroup::first_failure() const {
  const auto found = std::ranges::find_if(exits_, [](const WorkerExit& ended) {
    return !ended.status.is_success() && !ended.was_asked_to_stop && !ended.preemption;
  });
  if (found == exits_.end()) return std::nullopt;
  return *found;
}

std::optional<WorkerExit> WorkerGroup::first_preempted() const {
  const auto found = std::ranges::find_if(
      exits_, [](const WorkerExit& ended) { return ended.preemption.has_value(); });
  if (found == exits_.end()) return std::nullopt;
  return *found;
}

const WorkerGroup::Worker& WorkerGroup::worker(Rank rank) const {
  const auto found =
      std::ranges::find_if(workers_, [&](const auto& worker) { return worker->rank == rank; });
  if (found == workers_.end()) {
    throw Error(ErrorCode::kInternal, cadre::format("rank {} is not in this group", rank));
  }
  return **found;
}

const LineTail& WorkerGroup::tail(Rank rank) const {
  return worker(rank).output->tail();
}

int WorkerGroup::pid(Rank rank) const {
  return worker(rank).process->pid();
}

const std::string& WorkerGroup::error_file(Rank rank) const {
  return worker(rank).error_file;
}

void WorkerGroup::forward_signal(int signal) {
  for (const auto& worker : workers_) {
    if (!worker->has_ended) worker->process->signal(signal);
  }
}

void WorkerGroup::ask_to_stop(Worker& worker, int signal) {
  if (!worker.was_asked_to_stop) look_for_stop(worker);
  worker.was_asked_to_stop = true;
  worker.process->signal_group(signal);
}

void WorkerGroup::ask_to_stop_if(int signal,
                                 const std::function<bool(const Worker&)>& is_concerned) {
  // Exits up to now are recorded first, because the launcher did not cause them. A worker that a
  // signal has stopped (state T) is recorded too, because it may be the cause of the failure.
  collect_exits();
  bool has_asked = false;
  for (const auto& worker : workers_) {
    if (worker->has_ended || !is_concerned(*worker)) continue;
    ask_to_stop(*worker, signal);
    has_asked = true;
  }
  if (!has_asked || signal == SIGKILL) return;  // SIGKILL ends stopped processes, too
  std::vector<os::Descendant> asked = descendants();
  std::erase_if(asked, [this](const auto& process) { return !is_in_asked_group(process); });
  continue_stopped(asked);
}

bool WorkerGroup::is_in_asked_group(const os::Descendant& process) const {
  return std::ranges::any_of(workers_, [&](const auto& worker) {
    return worker->was_asked_to_stop && worker->process->pid() == process.process_group;
  });
}

// A process to which suspend() has sent SIGSTOP may not have stopped yet. It looks like one that
// runs, so all processes get SIGCONT until resume().
void WorkerGroup::continue_stopped(std::span<const os::Descendant> processes) const {
  if (is_suspended_) return os::signal_processes(processes, SIGCONT);
  os::continue_stopped(processes);
}

void WorkerGroup::ask_to_stop(int signal) {
  ask_to_stop_if(signal, [this](const Worker& worker) { return !is_kept(worker); });
}

void WorkerGroup::ask_unable_to_stop(int signal) {
  ask_to_stop_if(signal, [signal](const Worker& worker) {
    return !worker.can_wait() && (!worker.was_asked_to_stop || signal == SIGKILL);
  });
}

void WorkerGroup::ask_rest_to_stop(int signal) {
  ask_to_stop_if(signal, [this](const Worker& worker) {
    return !worker.was_asked_to_stop && !is_kept(worker);
  });
}

void WorkerGroup::ask_leftovers_to_stop() {
  std::vector<os::Descendant> leftovers = descendants();
  std::erase_if(leftovers, [this](const os::Descendant& process) {
    return std::ranges::count(asked_leftovers_, process) > 0 || is_in_asked_group(process);
  });
  os::signal_processes(leftovers, SIGTERM);
  continue_stopped(leftovers);
  asked_leftovers_.insert(asked_leftovers_.end(), leftovers.begin(), leftovers.end());
}

void WorkerGroup::suspend() {
  is_suspended_ = true;
  // Repeats until no new process is found: one that was forked while the list was read appears in
  // the next list.
  std::vector<os::Descendant> stopped;
  // Kept workers are stopped, too.
  for (int round = 0; round < kMaxSuspendRounds; ++round) {
    std::vector<os::Descendant> running = os::list_descendants(spared_);
    std::erase_if(running, [&](const auto& one) { return std::ranges::count(stopped, one) > 0; });
    if (running.empty()) return;
    os::signal_processes(running, SIGSTOP);
    stopped.insert(stopped.end(), running.begin(), running.end());
  }
}

void WorkerGroup::resume() {
  continue_stopped(os::list_descendants(spared_));
  is_suspended_ = false;
}

bool WorkerGroup::look_for_stop(Worker& worker) const {
  const int before = worker.stopped_by;
  worker.stopped_by = is_suspended_ ? 0 : worker.process->stop_signal().value_or(0);
  return before == 0 && worker.stopped_by != 0;
}

std::vector<StoppedWorker> WorkerGroup::take_stopped() {
  std::vector<StoppedWorker> stopped;
  for (const auto& worker : workers_) {
    if (worker->has_ended || worker->was_asked_to_stop || !look_for_stop(*worker)) continue;
    stopped.push_back(
        {.rank = worker->rank, .pid = worker->process->pid(), .signal = worker->stopped_by});
  }
  return stopped;
}

void WorkerGroup::reap_orphans() {
  std::vector<int> pids;
  for (const auto& worker : workers_) pids.push_back(worker->process->pid());
  pids.insert(pids.end(), spared_.begin(), spared_.end());
  os::reap_orphans(pids);
}

bool WorkerGroup::output_has_ended() const {
  return std::ranges::none_of(workers_, [this](const auto& worker) {
    return (worker->output_is_open || worker->error_is_open) && !is_kept(*worker);
  });
}

void WorkerGroup::finish_output() {
  for (const auto& worker : workers_) {
    if (!is_kept(*worker)) worker->output->finish();
  }
}

}  // namespace cadre::launch
