// What the kernel says of any process: /proc/PID/stat.
//
// Threads: any. Blocking: never. Errors: nullopt where no such process is in this pid namespace.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace cadre::os {

inline constexpr size_t kMaxStatBytes = 4096;  // limit for such a file

struct ProcessStat {
  int pid = 0;
  int parent_pid = 0;
  int process_group = 0;
  uint64_t start_time = 0;  // in ticks since the boot; with the pid it names a process for good
  std::string name;         // the kernel's short name of its program
  bool has_ended = false;   // and waits to be reaped
};

std::optional<ProcessStat> read_process_stat(int pid);

}  // namespace cadre::os
