// What a process inherits from its parent, and what the programs of this project change for
// themselves: dispositions of signals, limits, standard streams. Processes that they start get the
// original values. docs/guide/running/what-a-process-inherits.md lists all of it.
//
// Threads: call take_over_process() from main, before another thread runs or a file is opened; the
// rest from any. Blocking: never. Errors: take_over_process() throws Error(kUnavailable) if the
// stack is too small, with the limit and the remedy.
#pragma once

#include <signal.h>
#include <sys/resource.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::os {

// The soft limits of a process; nullopt means the limit of the parent.
struct SoftLimits {
  std::optional<uint64_t> descriptors = {};  // RLIMIT_NOFILE
  std::optional<uint64_t> stack_bytes = {};  // RLIMIT_STACK
};

struct Inherited {
  std::vector<int> ignored_signals;  // ascending
  SoftLimits limits;  // the original values of the limits that take_over_process() changed
};

// Returns the signals that this process ignores, in ascending order.
std::vector<int> ignored_signals();

// Prepares a program of this project. Not for a library: these settings belong to the whole
// process.
//   - A closed standard stream is opened on /dev/null (fill_closed_streams()).
// - SIGCHLD gets its default disposition: while it is ignored the kernel keeps no exit status of a
//   child.
// - SIGPIPE, SIGTTOU and SIGXFSZ are ignored: an output that cannot be written is an error of
//   write() instead of the end of the process.
//   - The soft limit of the stack is raised to 8 MiB, or as far as the hard one allows.
// Returns the values before the changes.
Inherited take_over_process();

sigset_t set_of_signals(const std::vector<int>& signals);
// Makes this process, a child, ignore exactly these signals, handle all others by default, and
// block none. May be called between fork() and exec.
void set_child_signals(const sigset_t& ignored);

// The arguments of one setrlimit().
struct LimitChange {
  __rlimit_resource_t resource;
  rlimit value;
};

// Returns the calls that set the soft limits and keep the hard ones.
std::vector<LimitChange> changes_to(const SoftLimits& limits);

// The cores on which a process may run. apply() may be called between fork() and exec.
class CoreMask {
 public:
  // An empty list leaves the process on its present cores.
  explicit CoreMask(const std::vector<int>& cores);
  // Binds the calling thread, and those that it starts later. Returns false and sets errno if the
  // kernel refuses.
  bool apply() const;

 private:
  std::vector<unsigned long> bits_;  // the layout of cpu_set_t
};

}  // namespace cadre::os
