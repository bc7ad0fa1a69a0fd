// The limits of the control groups that this process is in, of version 1, version 2 or both.
//
// Threads: any. Blocking: never. Errors: what cannot be read is no limit.
// Source: Linux, Documentation/admin-guide/cgroup-v1 and cgroup-v2, proc(5) for mountinfo.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace cadre::os {

// The tightest limits from the process's groups up to the roots of their hierarchies; absent:
// unlimited.
struct CgroupLimits {
  std::optional<uint64_t> memory_bytes;
  std::optional<double> cores;
};

// `root` is what stands before /proc/self and before the folders at which hierarchies are mounted:
// empty but in tests.
CgroupLimits read_cgroup_limits(const std::string& root = "");

}  // namespace cadre::os
