#include "cadre/core/os/proc/descendants.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/process_stat.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {
namespace {

std::vector<ProcessStat> read_all_stats() {
  std::vector<ProcessStat> stats;
  std::error_code failure;
  for (std::filesystem::directory_iterator entry("/proc", failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename();
    int pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ec != std::errc() || parsed.ptr != name.data() + name.size()) continue;
    if (auto stat = read_process_stat(pid)) stats.push_back(std::move(*stat));
  }
  return stats;
}

// The limit for reading a /proc/PID/status, of which the largest part are up to 65536 group ids.
constexpr size_t kMaxStatusBytes = size_t{1} << 20;

constexpr uint64_t bit_of(int signal) {
  return uint64_t{1} << (signal - 1);
}

// Returns whether a signal has stopped the process ("State:" in /proc/PID/status) or is pending and
// will. "ShdPnd:" has the signals that are pending for the whole process. The SIGSTOP of
// PTRACE_ATTACH is pending for one thread and is not among them.
bool is_stopped(int pid) {
  constexpr uint64_t kStops = bit_of(SIGSTOP) | bit_of(SIGTSTP) | bit_of(SIGTTIN) | bit_of(SIGTTOU);
  const auto text = read_file(cadre::format("/proc/{}/status", pid), kMaxStatusBytes);
  if (!text.ok()) return false;
  std::istringstream lines(*text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream fields(line);
    std::string name;
    std::string value;
    fields >> name >> value;
    if (name == "State:" && value == "T") return true;
    if (name == "ShdPnd:") return (std::strtoull(value.c_str(), nullptr, 16) & kStops) != 0;
  }
  return false;
}

bool is_among(std::span<const int> pids, int pid) {
  return std::ranges::find(pids, pid) != pids.end();
}

}  // namespace

void become_subreaper() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
}

std::vector<Descendant> list_descendants(std::span<const int> spared) {
  const std::vector<ProcessStat> stats = read_all_stats();
  std::vector<int> parents{::getpid()};
  std::vector<Descendant> found;
  for (size_t next = 0; next < parents.size(); ++next) {
    for (const ProcessStat& stat : stats) {
      if (stat.parent_pid != parents[next] || is_among(spared, stat.pid)) continue;
      parents.push_back(stat.pid);
      if (!stat.has_ended) {
        found.push_back({.pid = stat.pid,
                         .start_time = stat.start_time,
                         .process_group = stat.process_group,
                         .name = stat.name});
      }
    }
  }
  return found;
}

void signal_processes(std::span<const Descendant> processes, int signal) {
  for (const Descendant& process : processes) {
    // The start time is compared after the pidfd was opened: if it matches, the pidfd refers to the
    // listed process, and not to a later one with the same pid.
    const Fd pinned(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
    if (!pinned.is_open()) continue;
    const auto stat = read_process_stat(process.pid);
    if (!stat || stat->start_time != process.start_time) continue;
    ::syscall(SYS_pidfd_send_signal, pinned.get(), signal, nullptr, 0);
  }
}

void continue_stopped(std::span<const Descendant> processes) {
  for (const Descendant& process : processes) {
    if (is_stopped(process.pid)) signal_processes(std::span(&process, 1), SIGCONT);
  }
}

bool may_signal(const Descendant& process) {
  return ::kill(process.pid, 0) == 0 || errno != EPERM;
}

void reap_orphans(std::span<const int> spared) {
  for (const ProcessStat& stat : read_all_stats()) {
    if (!stat.has_ended || stat.parent_pid != ::getpid()) continue;
    if (is_among(spared, stat.pid)) continue;
    ::waitpid(stat.pid, nullptr, WNOHANG);
  }
}

bool has_children(std::span<const int> spared) {
  siginfo_t info{};
  const bool has_any = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
  if (!has_any || spared.empty()) return has_any;
  return std::ranges::any_of(read_all_stats(), [&](const ProcessStat& stat) {
    return stat.parent_pid == ::getpid() && !is_among(spared, stat.pid);
  });
}

}  // namespace cadre::os
