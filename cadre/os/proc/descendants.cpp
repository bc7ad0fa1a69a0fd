#include "cadre/os/proc/descendants.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <sstream>
#include <system_error>

#include "cadre/base/format.h"
#include "cadre/os/io/fd.h"
#include "cadre/os/io/file.h"

namespace cadre::os {
namespace {

constexpr size_t kMaxStatBytes = 4096;

struct ProcessStat {
  Descendant process;
  int parent_pid = 0;
  bool has_ended = false;
};

// /proc/PID/stat: "pid (name) state ppid ... starttime(field 22) ...". The name may hold spaces and
// parentheses, so the fields are counted from the last ')'.
std::optional<ProcessStat> read_stat(int pid) {
  const auto text = read_file(cadre::format("/proc/{}/stat", pid), kMaxStatBytes);
  if (!text.ok()) return std::nullopt;
  const size_t open = text->find('(');
  const size_t close = text->rfind(')');
  if (open == std::string::npos || close == std::string::npos) return std::nullopt;
  ProcessStat stat;
  stat.process.pid = pid;
  stat.process.name = text->substr(open + 1, close - open - 1);
  std::istringstream fields(text->substr(close + 1));
  std::string state;
  fields >> state >> stat.parent_pid;
  stat.has_ended = state == "Z" || state == "X";
  std::string skipped;
  for (int field = 5; field < 22; ++field) fields >> skipped;
  fields >> stat.process.start_time;
  if (!fields) return std::nullopt;
  return stat;
}

std::vector<ProcessStat> read_all_stats() {
  std::vector<ProcessStat> stats;
  std::error_code failure;
  for (std::filesystem::directory_iterator entry("/proc", failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename();
    int pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ec != std::errc() || parsed.ptr != name.data() + name.size()) continue;
    if (auto stat = read_stat(pid)) stats.push_back(std::move(*stat));
  }
  return stats;
}

}  // namespace

void become_subreaper() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
}

std::vector<Descendant> list_descendants() {
  const std::vector<ProcessStat> stats = read_all_stats();
  std::vector<int> parents{::getpid()};
  std::vector<Descendant> found;
  for (size_t next = 0; next < parents.size(); ++next) {
    for (const ProcessStat& stat : stats) {
      if (stat.parent_pid != parents[next]) continue;
      parents.push_back(stat.process.pid);
      if (!stat.has_ended) found.push_back(stat.process);
    }
  }
  return found;
}

void signal_processes(std::span<const Descendant> processes, int signal) {
  for (const Descendant& process : processes) {
    // The descriptor pins the process; only then is it sure that the number was not reused.
    const Fd pinned(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
    if (!pinned.is_open()) continue;
    const auto stat = read_stat(process.pid);
    if (!stat || stat->process.start_time != process.start_time) continue;
    ::syscall(SYS_pidfd_send_signal, pinned.get(), signal, nullptr, 0);
  }
}

void reap_orphans(std::span<const int> spared) {
  for (const ProcessStat& stat : read_all_stats()) {
    if (!stat.has_ended || stat.parent_pid != ::getpid()) continue;
    if (std::ranges::find(spared, stat.process.pid) != spared.end()) continue;
    ::waitpid(stat.process.pid, nullptr, WNOHANG);
  }
}

bool has_children() {
  siginfo_t info{};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

}  // namespace cadre::os
