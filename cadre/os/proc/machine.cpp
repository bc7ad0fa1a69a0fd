#include "cadre/os/proc/machine.h"

#include <sys/resource.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>

#include "cadre/os/files/file.h"
#include "cadre/os/host/cgroup_limits.h"
#include "cadre/os/host/host_info.h"

namespace cadre::os {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxProcBytes = 4 << 20;

std::string read_or_empty(const std::string& path) {
  auto content = read_file(path, kMaxProcBytes);
  return content.ok() ? *std::move(content) : "";
}

// The rest of the line that begins with `name`, after its colon.
std::string field_of(const std::string& text, std::string_view name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(name) || colon == std::string::npos) continue;
    const size_t value = line.find_first_not_of(" \t", colon + 1);
    return value == std::string::npos ? "" : line.substr(value);
  }
  return "";
}

std::optional<uint64_t> parse_number(std::string_view text) {
  uint64_t number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc()) return std::nullopt;
  return number;
}

std::optional<uint64_t> limit_of(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

int count_gpus(const Environment& environment) {
  int count = 0;
  std::error_code failure;
  for (fs::directory_iterator entry("/dev", failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename();
    constexpr std::string_view kPrefix = "nvidia";
    if (name.size() > kPrefix.size() && name.starts_with(kPrefix) &&
        std::all_of(name.begin() + kPrefix.size(), name.end(),
                    [](unsigned char c) { return std::isdigit(c) != 0; })) {
      ++count;
    }
  }
  const auto visible = environment.get("CUDA_VISIBLE_DEVICES");
  if (!visible) return count;
  if (visible->empty()) return 0;
  return std::min(count, static_cast<int>(std::ranges::count(*visible, ',')) + 1);
}

}  // namespace

MachineInfo read_machine_info(const Environment& environment) {
  MachineInfo info;
  const HostInfo host = read_host_info();
  info.host_name = host.name;
  info.num_cores = host.num_cores;
  info.num_gpus = count_gpus(environment);
  utsname kernel{};
  if (::uname(&kernel) == 0) info.kernel = std::string(kernel.sysname) + " " + kernel.release;
  info.cpu_model = field_of(read_or_empty("/proc/cpuinfo"), "model name");
  const std::string memory = read_or_empty("/proc/meminfo");
  info.total_memory_bytes = parse_number(field_of(memory, "MemTotal")).value_or(0) * 1024;
  info.available_memory_bytes = parse_number(field_of(memory, "MemAvailable")).value_or(0) * 1024;
  info.max_open_files = limit_of(RLIMIT_NOFILE);
  info.max_locked_bytes = limit_of(RLIMIT_MEMLOCK);
  const CgroupLimits limits = read_cgroup_limits();
  info.cgroup_memory_bytes = limits.memory_bytes;
  info.cgroup_cores = limits.cores;
  return info;
}

}  // namespace cadre::os
