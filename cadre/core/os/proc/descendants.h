// All descendants of this process: children, their children, and orphans that a subreaper adopted.
//
// Threads: one thread reaps. Blocking: never (a walk over /proc takes about a millisecond).
// Source: prctl(2) PR_SET_CHILD_SUBREAPER. A subreaper becomes the parent of every orphaned
// descendant, whatever process group or session the descendant moved to, so none can escape it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cadre::os {

struct Descendant {
  int pid = 0;
  uint64_t start_time = 0;  // pid and start time identify a process uniquely
  std::string name;         // the kernel's short name of its program
  friend bool operator==(const Descendant&, const Descendant&) = default;
};

// Makes this process the parent of all its orphaned descendants from now on. A forked child does
// not inherit this.
void become_subreaper();

// Returns the living descendants, except the processes in `spared` and their descendants. Processes
// that have ended and wait to be reaped are left out.
std::vector<Descendant> list_descendants(std::span<const int> spared = {});

// Sends the signal to each process that still exists with the same start time.
void signal_processes(std::span<const Descendant> processes, int signal);

// Sends SIGCONT to each of the processes that a signal has stopped, or stops as soon as it runs.
// The others do not get it, because SIGCONT discards every SIGSTOP that has not been received yet,
// also the one by which a debugger or LeakSanitizer (ptrace(2), PTRACE_ATTACH) stops a thread and
// for which it then would wait forever.
void continue_stopped(std::span<const Descendant> processes);

// Returns whether this user may signal the process: a program with set-user-ID may run as another
// user.
bool may_signal(const Descendant& process);

// Reaps every ended child except those in `spared`, which other code reaps.
void reap_orphans(std::span<const int> spared);

// Returns whether this process has a child that is not in `spared`, living or not yet reaped.
bool has_children(std::span<const int> spared = {});

}  // namespace cadre::os
