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
  uint64_t start_time = 0;
  int process_group = 0;
  std::string name;  // the kernel's short name of its program

  // The pid and the start time identify a process uniquely. A process may change the other members.
  friend bool operator==(const Descendant& a, const Descendant& b) {
    return a.pid == b.pid && a.start_time == b.start_time;
  }
};

// Makes this process the parent of all its orphaned descendants from now on. A forked child does
// not inherit this.
void become_subreaper();

// Returns the living descendants, except the processes in `spared` and their descendants. Processes
// that have ended and wait to be reaped are left out.
std::vector<Descendant> list_descendants(std::span<const int> spared = {});

// Sends the signal to each process that still exists with the same start time.
void signal_processes(std::span<const Descendant> processes, int signal);

// Sends SIGCONT to each of the processes that a signal has stopped, and to each that has such a
// signal pending. The others must not get SIGCONT: it discards a pending SIGSTOP, also one that a
// debugger or LeakSanitizer has sent with PTRACE_ATTACH (ptrace(2)), which would then wait forever.
void continue_stopped(std::span<const Descendant> processes);

// Returns whether this user may signal the process: a program with set-user-ID may run as another
// user.
bool may_signal(const Descendant& process);

// Reaps every ended child except those in `spared`, which other code reaps.
void reap_orphans(std::span<const int> spared);

// Returns whether this process has a child that is not in `spared`, living or not yet reaped.
bool has_children(std::span<const int> spared = {});

}  // namespace cadre::os
