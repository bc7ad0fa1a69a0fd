#include "cadre/core/os/host/process_stat.h"

#include <sstream>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"

namespace cadre::os {
namespace {}  // namespace

// Reads "pid (name) state ppid pgrp ... starttime(field 22) ...". The name may contain spaces and
// parentheses, so the fields are counted from the last ')'.
std::optional<ProcessStat> read_process_stat(int pid) {
  const auto text = read_file(cadre::format("/proc/{}/stat", pid), kMaxStatBytes);
  if (!text.ok()) return std::nullopt;
  const size_t open = text->find('(');
  const size_t close = text->rfind(')');
  if (open == std::string::npos || close == std::string::npos) return std::nullopt;
  ProcessStat stat;
  stat.pid = pid;
  stat.name = text->substr(open + 1, close - open - 1);
  std::istringstream fields(text->substr(close + 1));
  std::string state;
  fields >> state >> stat.parent_pid >> stat.process_group;
  stat.has_ended = state == "Z" || state == "X";
  std::string skipped;
  for (int field = 6; field < 22; ++field) fields >> skipped;
  fields >> stat.start_time;
  if (!fields) return std::nullopt;
  return stat;
}

}  // namespace cadre::os
