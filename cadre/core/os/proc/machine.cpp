#include "cadre/core/os/proc/machine.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/cgroup_limits.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/core/os/host/process_limit.h"

namespace cadre::os {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxProcBytes = 4 << 20;

std::string read_or_empty(const std::string& path) {
  auto content = read_file(path, kMaxProcBytes);
  return content.ok() ? *std::move(content) : "";
}

// Returns the rest of the line that begins with `name`, after its colon.
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

// Accepts "nvidia0", but not "nvidiactl".
bool is_gpu_file(std::string_view name) {
  constexpr std::string_view kPrefix = "nvidia";
  return name.size() > kPrefix.size() && name.starts_with(kPrefix) &&
         std::ranges::all_of(name.substr(kPrefix.size()),
                             [](unsigned char c) { return std::isdigit(c) != 0; });
}

// Returns the text without the spaces around it.
std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// A device is named by its number, or by an identifier, which only the driver can check.
bool names_a_gpu(std::string_view entry, int num_gpus) {
  if (entry.starts_with("GPU-") || entry.starts_with("MIG-")) return true;
  int number = -1;
  const auto parsed = std::from_chars(entry.data(), entry.data() + entry.size(), number);
  return parsed.ec == std::errc() && parsed.ptr == entry.data() + entry.size() && number >= 0 &&
         number < num_gpus;
}

}  // namespace

int count_gpus(const std::string& folder, const std::optional<std::string>& visible_devices) {
  int count = 0;
  std::error_code failure;
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    if (is_gpu_file(entry->path().filename().string())) ++count;
  }
  if (!visible_devices) return count;
  std::vector<std::string_view> visible;
  std::string_view rest = *visible_devices;
  while (static_cast<int>(visible.size()) < count) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view entry = trimmed(rest.substr(0, comma));
    if (!names_a_gpu(entry, count)) break;
    if (std::ranges::find(visible, entry) != visible.end()) return 0;
    visible.push_back(entry);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return static_cast<int>(visible.size());
}

MachineInfo read_machine_info(const Environment& environment) {
  MachineInfo info;
  const HostInfo host = read_host_info();
  info.host_name = host.name;
  info.num_cores = host.num_cores;
  info.num_gpus = count_gpus("/dev", environment.get("CUDA_VISIBLE_DEVICES"));
  utsname kernel{};
  if (::uname(&kernel) == 0) info.kernel = std::string(kernel.sysname) + " " + kernel.release;
  info.cpu_model = field_of(read_or_empty("/proc/cpuinfo"), "model name");
  const std::string memory = read_or_empty("/proc/meminfo");
  info.total_memory_bytes = parse_number(field_of(memory, "MemTotal")).value_or(0) * 1024;
  info.available_memory_bytes = parse_number(field_of(memory, "MemAvailable")).value_or(0) * 1024;
  info.max_open_files = process_limit(RLIMIT_NOFILE).soft;
  info.max_locked_bytes = process_limit(RLIMIT_MEMLOCK).soft;
  const CgroupLimits limits = read_cgroup_limits();
  info.cgroup_memory_bytes = limits.memory_bytes;
  info.cgroup_cores = limits.cores;
  return info;
}

uint64_t count_memory_kills() {
  std::istringstream lines(read_or_empty("/proc/vmstat"));
  std::string name;
  uint64_t count = 0;
  while (lines >> name >> count) {
    if (name == "oom_kill") return count;
  }
  return 0;
}

}  // namespace cadre::os
