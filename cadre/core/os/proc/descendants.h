// All processes below this one: children, their children, and orphans that a subreaper adopted.
//
// Threads: one thread reaps. Blocking: never (a walk over /proc takes about a millisecond).
// Source: prctl(2) PR_SET_CHILD_SUBREAPER. A subreaper becomes the parent of every orphaned
// descendant, whatever group or session that moved to, so nothing can hide below it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cadre::os {

struct Descendant {
  int pid = 0;
  uint64_t start_time = 0;  // with the pid it names a process for good
  std::string name;         // the kernel's short name of its program
  friend bool operator==(const Descendant&, const Descendant&) = default;
};

// From now on orphaned descendants become children of this process. Not inherited by fork.
void become_subreaper();

// The living ones; those that have ended and wait to be reaped are left out.
std::vector<Descendant> list_descendants();

// Sends to each that is still the same process.
void signal_processes(std::span<const Descendant> processes, int signal);

// Whether this user may signal it: a program with set-user-ID may have become another user's.
bool may_signal(const Descendant& process);

// Reaps every ended child but `spared`, which have owners.
void reap_orphans(std::span<const int> spared);

// Whether this process has a child, living or not yet reaped.
bool has_children();

}  // namespace cadre::os
