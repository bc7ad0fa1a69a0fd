#include "cadre/core/os/host/cgroup_limits.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "cadre/core/os/files/file.h"

namespace cadre::os {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxFileBytes = 4 << 20;
// Version 1 writes "no limit" as the largest number of whole pages; no machine has 2^60 bytes.
constexpr uint64_t kUnlimitedBytes = uint64_t{1} << 60;

std::string read_or_empty(const fs::path& path) {
  auto content = read_file(path.string(), kMaxFileBytes);
  return content.ok() ? *std::move(content) : "";
}

std::optional<uint64_t> parse_number(const std::string& text) {
  uint64_t number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc()) return std::nullopt;
  return number;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool contains(const std::vector<std::string>& parts, std::string_view wanted) {
  return std::ranges::find(parts, wanted) != parts.end();
}

// A hierarchy of control groups that is mounted here.
struct CgroupMount {
  bool is_version_2 = false;
  // The controllers of a version 1 hierarchy, which are among the options of its mount.
  std::vector<std::string> controllers;
  std::string group;   // the group at the mount point, which is "/" except in a container
  std::string folder;  // the folder of the mount point
};

// Reads lines such as "30 23 0:26 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory".
// There may be optional words before the dash; the words after it have fixed positions.
std::vector<CgroupMount> read_mounts(const std::string& root) {
  constexpr size_t kGroup = 3;
  constexpr size_t kFolder = 4;
  std::vector<CgroupMount> mounts;
  for (const std::string& line : split(read_or_empty(root + "/proc/self/mountinfo"), '\n')) {
    const std::vector<std::string> words = split(line, ' ');
    const auto dash = std::ranges::find(words, "-");
    if (words.end() - dash < 4 || dash - words.begin() <= static_cast<long>(kFolder)) continue;
    if (dash[1] != "cgroup" && dash[1] != "cgroup2") continue;
    mounts.push_back({.is_version_2 = dash[1] == "cgroup2",
                      .controllers = split(dash[3], ','),
                      .group = words[kGroup],
                      .folder = words[kFolder]});
  }
  return mounts;
}

// Returns this process's group in the hierarchy, from "4:cpu,cpuacct:/docker/a" and "0::/docker/a".
std::string own_group(const std::string& memberships, const CgroupMount& mount,
                      std::string_view controller) {
  for (const std::string& line : split(memberships, '\n')) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (mount.is_version_2 ? controllers.empty() : contains(split(controllers, ','), controller)) {
      return line.substr(second + 1);
    }
  }
  return "/";
}

// Returns the control group's folder and its parents, up to the mount point. If the group is not
// below the mounted one (the process was moved in from outside the container), returns only the
// mount point.
std::vector<fs::path> folders_of(const std::string& root, const CgroupMount& mount,
                                 const std::string& group) {
  const std::string above = mount.group == "/" ? "" : mount.group;
  std::vector<fs::path> folders{root + mount.folder};
  if (!group.starts_with(above) || group.find("..") != std::string::npos) return folders;
  for (const std::string& name : split(group.substr(above.size()), '/')) {
    if (!name.empty()) folders.push_back(folders.back() / name);
  }
  return folders;
}

template <typename T>
void tighten(std::optional<T>& limit, T candidate) {
  limit = std::min(candidate, limit.value_or(candidate));
}

void add_memory_limit(const CgroupMount& mount, const fs::path& folder, CgroupLimits& limits) {
  const char* name = mount.is_version_2 ? "memory.max" : "memory.limit_in_bytes";
  const auto bytes = parse_number(read_or_empty(folder / name));  // "max" is not parsed as a number
  if (bytes && *bytes < kUnlimitedBytes) tighten(limits.memory_bytes, *bytes);
}

// Reads "50000 100000" from one file (version 2) or from two (version 1). No limit is -1 in version
// 1 and "max" in version 2.
void add_core_limit(const CgroupMount& mount, const fs::path& folder, CgroupLimits& limits) {
  std::istringstream text(mount.is_version_2 ? read_or_empty(folder / "cpu.max")
                                             : read_or_empty(folder / "cpu.cfs_quota_us") + " " +
                                                   read_or_empty(folder / "cpu.cfs_period_us"));
  double quota = 0;
  double period = 0;
  if (text >> quota >> period && quota > 0 && period > 0) tighten(limits.cores, quota / period);
}

// Returns the number after `name` in a file of lines such as "oom_kill 3"; 0 if there is none.
uint64_t counter_of(const std::string& text, std::string_view name) {
  std::istringstream lines(text);
  std::string key;
  std::string value;
  while (lines >> key >> value) {
    if (key == name) return parse_number(value).value_or(0);
  }
  return 0;
}

uint64_t free_below(uint64_t limit, uint64_t used) {
  return limit > used ? limit - used : 0;
}

void add_memory_usage(const CgroupMount& mount, const fs::path& folder, CgroupUsage& usage) {
  CgroupLimits limits;
  add_memory_limit(mount, folder, limits);
  const auto used = parse_number(
      read_or_empty(folder / (mount.is_version_2 ? "memory.current" : "memory.usage_in_bytes")));
  if (!limits.memory_bytes || !used) return;
  // The counters of the whole subtree. "file" is not used, because it has shared memory, too.
  const std::string prefix = mount.is_version_2 ? "" : "total_";
  const std::string counters = read_or_empty(folder / "memory.stat");
  const uint64_t cache =
      counter_of(counters, prefix + "inactive_file") + counter_of(counters, prefix + "active_file");
  tighten(usage.free_memory_bytes, free_below(*limits.memory_bytes, free_below(*used, cache)));
}

void add_throttling(const CgroupMount& mount, const fs::path& folder, CgroupUsage& usage) {
  const std::string text = read_or_empty(folder / "cpu.stat");
  const uint64_t num_throttled = counter_of(text, "nr_throttled");
  if (num_throttled < usage.num_throttled_periods) return;
  usage.num_periods = counter_of(text, "nr_periods");
  usage.num_throttled_periods = num_throttled;
  constexpr uint64_t kNanosecondsPerMicrosecond = 1000;
  usage.throttled_time = std::chrono::microseconds(
      mount.is_version_2 ? counter_of(text, "throttled_usec")
                         : counter_of(text, "throttled_time") / kNanosecondsPerMicrosecond);
}

void add_process_usage(const fs::path& folder, CgroupUsage& usage) {
  const auto limit = parse_number(read_or_empty(folder / "pids.max"));
  const auto used = parse_number(read_or_empty(folder / "pids.current"));
  if (limit && used) tighten(usage.free_processes, free_below(*limit, *used));
}

// Calls `visit` with the mount and the folder of each group that has the controller: this process's
// group and all of its parents, the parents first.
void visit_groups(const std::string& root, std::string_view controller,
                  const std::function<void(const CgroupMount&, const fs::path&)>& visit) {
  const std::string memberships = read_or_empty(root + "/proc/self/cgroup");
  for (const CgroupMount& mount : read_mounts(root)) {
    if (!mount.is_version_2 && !contains(mount.controllers, controller)) continue;
    for (const fs::path& folder :
         folders_of(root, mount, own_group(memberships, mount, controller))) {
      visit(mount, folder);
    }
  }
}

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& root) {
  CgroupLimits limits;
  visit_groups(root, "memory", [&](const CgroupMount& mount, const fs::path& folder) {
    add_memory_limit(mount, folder, limits);
  });
  visit_groups(root, "cpu", [&](const CgroupMount& mount, const fs::path& folder) {
    add_core_limit(mount, folder, limits);
  });
  return limits;
}

CgroupUsage read_cgroup_usage(const std::string& root) {
  CgroupUsage usage;
  visit_groups(root, "memory", [&](const CgroupMount& mount, const fs::path& folder) {
    add_memory_usage(mount, folder, usage);
    const std::string events =
        read_or_empty(folder / (mount.is_version_2 ? "memory.events" : "memory.oom_control"));
    // The last folder is that of this process's group. A hierarchy without memory has no events.
    if (!events.empty()) usage.num_memory_kills = counter_of(events, "oom_kill");
  });
  visit_groups(root, "cpu", [&](const CgroupMount& mount, const fs::path& folder) {
    add_throttling(mount, folder, usage);
  });
  visit_groups(root, "pids", [&](const CgroupMount&, const fs::path& folder) {
    add_process_usage(folder, usage);
  });
  return usage;
}

}  // namespace cadre::os
