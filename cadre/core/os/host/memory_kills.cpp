#include "cadre/core/os/host/memory_kills.h"

#include <sstream>
#include <string>

#include "cadre/core/os/files/file.h"

namespace cadre::os {

uint64_t count_memory_kills() {
  constexpr size_t kMaxBytes = 1 << 20;
  const auto content = read_file("/proc/vmstat", kMaxBytes);
  if (!content.ok()) return 0;
  std::istringstream lines(*content);
  std::string name;
  uint64_t count = 0;
  while (lines >> name >> count) {
    if (name == "oom_kill") return count;
  }
  return 0;
}

}  // namespace cadre::os
