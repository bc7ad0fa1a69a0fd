// What a process gets from the one that started it, and what the programs of this project change of
// it for themselves: dispositions of signals, limits, standard streams. A process that they start
// is given back what they got. docs/guide/running/what-a-process-inherits.md lists all of it.
//
// Threads: take_over_process() from main, before another thread runs or a file is opened; the rest
// from any. Blocking: never. Errors: take_over_process() throws Error(kUnavailable) if the stack is
// too small, with the limit and the remedy.
#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::os {

// Soft limits; nullopt: as they are in the parent.
struct SoftLimits {
  std::optional<uint64_t> descriptors = {};  // RLIMIT_NOFILE
  std::optional<uint64_t> stack_bytes = {};  // RLIMIT_STACK
};

struct Inherited {
  std::vector<int> ignored_signals;  // ascending
  SoftLimits limits;                 // those that take_over_process() changed
};

// The signals that this process ignores, ascending.
std::vector<int> ignored_signals();

// For a program of this project, not for a library: all this belongs to the whole process.
//   - A closed standard stream is opened on /dev/null (fill_closed_streams()).
//   - SIGCHLD gets its default: while it is ignored the kernel keeps no exit status of a child.
//   - SIGPIPE, SIGTTOU and SIGXFSZ are ignored: an output that cannot be written is an error of
//     write() instead of the end of the process.
//   - The soft limit of the stack is raised to 8 MiB, or as far as the hard one allows.
// Returns what was there before.
Inherited take_over_process();

// A value for setrlimit().
struct LimitChange {
  __rlimit_resource_t resource;
  rlimit value;
};

// Sets the soft limits, and keeps the hard ones.
std::vector<LimitChange> changes_to(const SoftLimits& limits);

}  // namespace cadre::os
