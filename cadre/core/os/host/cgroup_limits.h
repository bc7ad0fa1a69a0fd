// The limits of the control groups of this process, of version 1, version 2 or both.
//
// Threads: any. Blocking: never. Errors: none; a limit that cannot be read counts as absent.
// Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2, proc(5) for mountinfo.
#pragma once

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

}  // namespace cadre::os
