// Reads /proc/PID/stat, in which the kernel describes any process of this pid namespace.
//
// Threads: any. Blocking: never. Errors: nullopt if there is no such process in this pid namespace.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace cadre::os {

inline constexpr size_t kMaxStatBytes = 4096;  // the limit for reading a /proc/PID/stat

struct ProcessStat {
  int pid = 0;
  int parent_pid = 0;
  int process_group = 0;
  // The time at which the process started, in clock ticks since the boot. The pid and the start
  // time identify a process uniquely.
  uint64_t start_time = 0;
  std::string name;        // the kernel's short name of its program
  bool has_ended = false;  // the process has ended and waits to be reaped
};

std::optional<ProcessStat> read_process_stat(int pid);

}  // namespace cadre::os
