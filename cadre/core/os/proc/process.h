// A child process: started, watched, signalled and reaped.
//
// Threads: start() from the thread that outlives the child, because the kernel ties the
// parent-death signal to the *thread* that forked; everything else from one thread.
// Blocking: start() until the child has executed the program or failed to (milliseconds);
// the destructor for at most a second.
// Lifetime: the destructor kills the child's process group and reaps the child if it still runs and
// this user may kill it.
// Errors: kInvalidArgument when the program cannot be executed, with the system's reason;
// kUnavailable when the machine has no process, memory or descriptor left.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/exit_status.h"
#include "cadre/core/os/proc/inherited.h"
#include "cadre/core/os/proc/pipe.h"

namespace cadre::os {

struct ProcessOptions {
  std::string executable;                // The path of the program.
  std::vector<std::string> arguments;    // argv, which begins with the program's name
  std::vector<std::string> environment;  // "NAME=value"; the child inherits no other variable
  // Standard error goes into the pipe of standard output, which keeps the order of the child's
  // writes to both. standard_error() is then at its end from the start.
  bool joins_output = false;
  // The signals that the child ignores; it handles all others by default.
  std::vector<int> ignored_signals = {};
  // The child's soft limits, for a parent that has raised its own limits.
  SoftLimits soft_limits = {};
  // The numbers of the cores on which the child may run, as the kernel counts them. Empty: those of
  // the parent.
  std::vector<int> cores = {};
  // The child reads from the parent's standard input instead of /dev/null.
  bool inherits_input = false;
};

// The child leads a process group of its own, reads from /dev/null by default, writes to pipes,
// inherits no other descriptor, blocks no signal, and is killed when its parent dies.
class Process {
  struct Parts;  // private, so that only start() and adopt() can make a Process

 public:
  static Result<std::unique_ptr<Process>> start(const ProcessOptions& options);
  // Takes over a child that another process has forked for this one (fork_server.h), with the
  // reading ends of its output.
  static Result<std::unique_ptr<Process>> adopt(int pid, Fd standard_output, Fd standard_error);
  explicit Process(Parts parts);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int pid() const { return pid_; }
  // Returns a pidfd, which is readable once the child has ended.
  Pollable& exit_event() { return exit_event_; }
  PipeReader& standard_output() { return standard_output_; }
  PipeReader& standard_error() { return standard_error_; }

  // Reaps the child if it has ended, and returns the same status from then on. A child that was
  // reaped elsewhere has an unknown status (ExitStatus::is_known).
  std::optional<ExitStatus> try_wait();
  // Returns the signal that has stopped the child (SIGSTOP, SIGTSTP); nullopt unless the child is
  // stopped.
  std::optional<int> stop_signal() const;
  // Sends the signal to the child only. Does nothing after the child was reaped.
  void signal(int signal);
  // Sends the signal to every process of the child's process group. Does nothing after the child
  // was reaped, because its number may then belong to another process.
  void signal_group(int signal);

 private:
  struct Parts {
    int pid = 0;
    Fd exit_event;
    Fd standard_output;
    Fd standard_error;
  };

  class ExitEvent final : public Pollable {
   public:
    explicit ExitEvent(Fd fd) : fd_(std::move(fd)) {}
    int poll_handle() const override { return fd_.get(); }

   private:
    Fd fd_;
  };

  const int pid_;
  ExitEvent exit_event_;
  PipeReader standard_output_;
  PipeReader standard_error_;
  std::optional<ExitStatus> status_;
};

}  // namespace cadre::os
