#include "cadre/core/os/host/cgroup_limits.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
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

}  // namespace

CgroupLimits read_cgroup_limits(const std::string& root) {
  const std::string memberships = read_or_empty(root + "/proc/self/cgroup");
  CgroupLimits limits;
  for (const CgroupMount& mount : read_mounts(root)) {
    if (mount.is_version_2 || contains(mount.controllers, "memory")) {
      const std::string group = own_group(memberships, mount, "memory");
      for (const fs::path& folder : folders_of(root, mount, group)) {
        add_memory_limit(mount, folder, limits);
      }
    }
    if (mount.is_version_2 || contains(mount.controllers, "cpu")) {
      const std::string group = own_group(memberships, mount, "cpu");
      for (const fs::path& folder : folders_of(root, mount, group)) {
        add_core_limit(mount, folder, limits);
      }
    }
  }
  return limits;
}

}  // namespace cadre::os
