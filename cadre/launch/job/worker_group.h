// Starts, watches and stops the workers of one job on this host.
//
// Threads: one, which must outlive the workers (see core/os/proc/process.h). The process must be a
// subreaper (core/os/proc/guardian.h), so that processes which workers left running can be found.
// Blocking: start() takes milliseconds for each worker; step() waits until its Deadline. Lifetime:
// the destructor kills workers that still run. The outputs outlive the WorkerGroup. Errors: start()
// returns those of os::Process, with the rank, after it has killed the workers that it had started.
// The owner (job.h) decides when to stop the group.
//
// A worker that waits for a new membership (Recovery) can be kept: while keep_waiting(true) holds,
// the methods that stop processes leave it and its descendants alone, and the WorkerGroup of the
// next round continues it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/proc/descendants.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/system.h"
#include "cadre/core/wire/preemption_file.h"
#include "cadre/core/wire/recovery/recovery_files.h"
#include "cadre/launch/job/output/buffered_output.h"
#include "cadre/launch/job/output/worker_output.h"

namespace cadre::launch {

struct WorkerSpec {
  Rank rank;
  os::ProcessOptions process;
  WorkerOutputOptions output;
  os::ForkServer* fork_server = nullptr;  // forks the worker if possible; null: executes it
  std::string error_file = {};            // the file that TORCHELASTIC_ERROR_FILE names
  std::string recovery_file = {};         // the file that CADRE_RECOVERY_FILE names
};

// Describes how a worker ended.
struct WorkerExit {
  Rank rank;
  int pid = 0;
  os::ExitStatus status;
  Duration lifetime{};
  bool was_asked_to_stop = false;  // the launcher had signalled the worker
  int stopped_by = 0;              // the signal that had stopped it before; 0: none
  // What the worker has saved, if it has left because a scheduler ends the job.
  std::optional<PreemptionFile> preemption = {};
};

// A worker that a signal has stopped.
struct StoppedWorker {
  Rank rank;
  int pid = 0;
  int signal = 0;
};

class WorkerGroup {
 public:
  // Workers that were kept. The destructor kills them.
  class KeptWorkers;

  // If `output` and `error` are the same, each worker has one pipe for both of its streams.
  WorkerGroup(os::System& system, BufferedOutput& output, BufferedOutput& error);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // Starts the workers; those of `kept` get the membership of their spec instead of a process.
  Status start(std::span<const WorkerSpec> specs, KeptWorkers kept);

  // Excludes a process from descendants() from now on, so that it is neither signalled nor waited
  // for. The template of the fork server is such a process.
  void spare(int pid) { spared_ = {pid}; }
  std::vector<os::Descendant> descendants() const { return os::list_descendants(spared()); }
  bool has_children() const { return os::has_children(spared()); }

  void keep_waiting(bool is_kept) { keeps_waiting_ = is_kept; }
  // Reads from the workers' files which of them wait.
  void read_recovery_files();
  // Returns the longest time after which a running worker that can wait comes to wait; nullopt if
  // none can.
  std::optional<Duration> recovery_time() const;
  // Returns whether each worker has ended or is kept.
  bool all_settled() const;
  // Returns the ranks that wait and are kept, ascending.
  std::vector<int> kept_ranks() const;
  // Tells the running workers that can wait which ranks have lost their hosts.
  void name_lost_ranks(std::span<const RankRange> ranks);
  // Sends the signal to the running workers that cannot wait; one other than SIGKILL only to those
  // that were not signalled yet.
  void ask_unable_to_stop(int signal);
  // Sends the signal to the running workers that are not kept and were not signalled yet.
  void ask_rest_to_stop(int signal);
  // Takes the kept workers out of the group, which then must be destroyed.
  KeptWorkers take_kept();

  // One iteration of the loop: waits until a worker has written or ended, one of `also` is ready,
  // or the deadline; then passes on output and reaps.
  void step(std::span<os::PollItem> also, Deadline deadline);

  int size() const { return static_cast<int>(workers_.size()); }
  // Returns the exits in the order in which they were noticed.
  const std::vector<WorkerExit>& exits() const { return exits_; }
  bool all_ended() const { return exits_.size() == workers_.size(); }
  // Returns the ranks of running workers that are not kept, ascending.
  std::vector<int> running_ranks() const;
  // Returns the first worker that failed before it was asked to stop. One that has saved and left
  // because a scheduler ends the job has not failed.
  std::optional<WorkerExit> first_failure() const;
  // Returns the first worker that has saved and left for that reason.
  std::optional<WorkerExit> first_preempted() const;
  const LineTail& tail(Rank rank) const;
  int pid(Rank rank) const;
  // Returns the error file of the worker, whose name is that of the round in which its process was
  // started.
  const std::string& error_file(Rank rank) const;

  // Sends the signal (SIGUSR1 or SIGUSR2) to the running workers only, because it would kill
  // processes of theirs that have no handler for it.
  void forward_signal(int signal);
  // Stops all descendants of this process, as for Ctrl-Z, until resume().
  void suspend();
  void resume();
  bool is_suspended() const { return is_suspended_; }
  // Returns the workers that were stopped since the last call, other than by suspend().
  std::vector<StoppedWorker> take_stopped();
  // Signals the process groups of the running workers, and continues stopped ones so that they
  // receive the signal. Workers that exit afterwards do not count as failed.
  void ask_to_stop(int signal);
  // Sends SIGTERM once to each process that the workers left running, except to process groups that
  // ask_to_stop() has signalled, because many programs treat a second signal as a request to end at
  // once. REQUIRES: all_ended().
  void ask_leftovers_to_stop();
  // Reaps orphans of workers that have ended; called on SIGCHLD.
  void reap_orphans();

  // Returns whether all pipes have ended, except those of kept workers.
  bool output_has_ended() const;
  // Adds the missing newline to unfinished last lines. Must be the last call, except for
  // take_kept().
  void finish_output();

 private:
  struct Worker;
  const Worker& worker(Rank rank) const;
  void collect_exits();
  // Returns whether a signal has stopped the worker since the last call.
  bool look_for_stop(Worker& worker) const;
  bool is_kept(const Worker& worker) const;
  std::vector<int> spared() const;
  void ask_to_stop(Worker& worker, int signal);
  // Asks the running workers for which `is_concerned` holds, and continues the stopped processes of
  // all process groups that were asked.
  void ask_to_stop_if(int signal, const std::function<bool(const Worker&)>& is_concerned);
  bool is_in_asked_group(const os::Descendant& process) const;
  void continue_stopped(std::span<const os::Descendant> processes) const;
  Result<std::unique_ptr<Worker>> start_worker(const WorkerSpec& spec);
  std::vector<BufferedOutput*> sinks();
  // Returns the time at which step() must run even without an event.
  Deadline next_due() const;
  std::vector<os::PollItem> poll_items(std::span<const os::PollItem> also);

  os::System& system_;
  BufferedOutput& output_;
  BufferedOutput& error_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<WorkerExit> exits_;
  std::vector<std::byte> buffer_;  // not on the stack, which may be small
  std::vector<os::Descendant> asked_leftovers_;
  std::vector<int> spared_;
  TimePoint last_progress_;
  bool is_suspended_ = false;
  bool keeps_waiting_ = false;
};

class WorkerGroup::KeptWorkers {
 public:
  KeptWorkers();
  ~KeptWorkers();
  KeptWorkers(KeptWorkers&& other) noexcept;
  KeptWorkers& operator=(KeptWorkers&& other) noexcept;

 private:
  friend class WorkerGroup;
  // The workers by local rank; null where a new process is needed.
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace cadre::launch
