// The workers of one job on this host: started together, watched together, stopped together.
//
// Threads: one, the one that outlives the workers (os/proc/process.h says why). The process must be
// a subreaper (os/proc/guardian.h), so that what a worker leaves behind can be found.
// Blocking: start() for milliseconds a worker; step() until its Deadline.
// Lifetime: the destructor kills workers that still run. The outputs outlive the group.
// Errors: start() gives os::Process's, with the rank; no worker runs then.
// Policy is not here: whoever owns the group decides when to stop it (launch/job.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/launch/buffered_output.h"
#include "cadre/launch/worker_output.h"
#include "cadre/os/proc/descendants.h"
#include "cadre/os/proc/process.h"
#include "cadre/os/system.h"

namespace cadre::launch {

struct WorkerSpec {
  Rank rank;
  os::ProcessOptions process;
  WorkerOutputOptions output;
};

// How a worker ended.
struct WorkerExit {
  Rank rank;
  int pid = 0;
  os::ExitStatus status;
  Duration lifetime{};
  bool was_asked_to_stop = false;  // a signal of ours came first
  int stopped_by = 0;              // the signal that had stopped it when it was asked; 0: it ran
};

// A worker that does not run, because a signal stopped it.
struct StoppedWorker {
  Rank rank;
  int pid = 0;
  int signal = 0;
};

class WorkerGroup {
 public:
  // If both outputs are the same, each worker has one pipe for both of its streams.
  WorkerGroup(os::System& system, BufferedOutput& output, BufferedOutput& error);
  ~WorkerGroup();
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  Status start(std::span<const WorkerSpec> specs);

  // Moves output and reaps, once: waits until a worker wrote or ended, one of `also` is ready, or
  // the deadline.
  void step(std::span<os::PollItem> also, Deadline deadline);

  int size() const { return static_cast<int>(workers_.size()); }
  // In the order in which they were noticed.
  const std::vector<WorkerExit>& exits() const { return exits_; }
  bool all_ended() const { return exits_.size() == workers_.size(); }
  // Ascending.
  std::vector<int> running_ranks() const;
  // The first that ended badly without having been asked to stop.
  std::optional<WorkerExit> first_failure() const;
  const LineTail& tail(Rank rank) const;

  // To the workers that still run, and not to what they started: the signals forwarded so (SIGUSR1)
  // end a process that does not expect them.
  void forward_signal(int signal);
  // Stops everything below this process, as Ctrl-Z is to, until resume().
  void suspend();
  void resume();
  // Workers that were stopped by another than suspend() since the last call.
  std::vector<StoppedWorker> take_stopped();
  // To the process groups of the workers that still run, which are continued to take it. From now
  // on their exits are no failures.
  void ask_to_stop(int signal);
  // SIGTERM to what the workers have started and left running, once to each process. Left out are
  // process groups that ask_to_stop() has reached: a second signal means haste to many programs.
  // REQUIRES: all_ended().
  void ask_leftovers_to_stop();
  // Reaps orphans of workers that have ended; to be called at SIGCHLD.
  void reap_orphans();

  // Whether all pipes have ended, so that nothing more can come.
  bool output_has_ended() const;
  // Shows lines that have no newline. To be called last.
  void finish_output();

 private:
  struct Worker;
  void collect_exits();
  // Whether a signal has stopped the worker since the last look.
  bool look_for_stop(Worker& worker) const;
  std::vector<BufferedOutput*> sinks();
  // When step() has something to do although nothing has happened.
  Deadline next_due() const;
  std::vector<os::PollItem> poll_items(std::span<const os::PollItem> also);

  os::System& system_;
  BufferedOutput& output_;
  BufferedOutput& error_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<WorkerExit> exits_;
  std::vector<os::Descendant> asked_leftovers_;
  TimePoint last_progress_;
  bool is_suspended_ = false;
};

}  // namespace cadre::launch
