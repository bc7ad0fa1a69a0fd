// The limits of the control groups of this process, of version 1, version 2 or both, and what the
// groups have used of them.
//
// Threads: any. Blocking: never. Errors: none; a limit that cannot be read counts as absent.
// Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2, proc(5) for mountinfo.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace cadre::os {

// The lowest limits that apply to this process: those of its groups and of all their parents.
// nullopt means unlimited.
struct CgroupLimits {
  std::optional<uint64_t> memory_bytes;
  std::optional<double> cores;
};

// `root` is prepended to /proc/self and to the folders at which hierarchies are mounted. It is
// empty except in tests.
CgroupLimits read_cgroup_limits(const std::string& root = "");

// What the control groups of this process have used so far.
struct CgroupUsage {
  // The memory, and the number of processes and threads, that the groups may still use; nullopt
  // without a limit. The cache of files, which the kernel frees when memory is short, counts as
  // free.
  std::optional<uint64_t> free_memory_bytes;
  std::optional<uint64_t> free_processes;
  uint64_t num_memory_kills = 0;  // processes of this group that were killed at its memory limit
  // The periods in which a group ran, those in which it was stopped because its processor time was
  // used up, and the sum of the stops. They are those of the group, or of the parent, that was
  // stopped most often.
  uint64_t num_periods = 0;
  uint64_t num_throttled_periods = 0;
  std::chrono::microseconds throttled_time{0};
};

CgroupUsage read_cgroup_usage(const std::string& root = "");

}  // namespace cadre::os
