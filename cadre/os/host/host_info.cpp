#include "cadre/os/host/host_info.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "cadre/os/io/file.h"

namespace cadre::os {
namespace {

constexpr size_t kMaxBootIdBytes = 128;
constexpr size_t kMaxHostNameBytes = 256;

std::string read_boot_id() {
  std::string text = read_file("/proc/sys/kernel/random/boot_id", kMaxBootIdBytes).value_or_throw();
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string read_host_name() {
  std::array<char, kMaxHostNameBytes> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

// Fails on machines with more than 1024 cores; there all cores are near enough.
cpu_set_t usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return cores;
  const int num_online = num_online_cores();
  for (int core = 0; core < std::min(num_online, CPU_SETSIZE); ++core) CPU_SET(core, &cores);
  return cores;
}

std::string mask_of(const cpu_set_t& cores) {
  std::string mask;
  for (size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &cores)) continue;
    mask.resize(core / 8 + 1);
    mask.back() = static_cast<char>(static_cast<unsigned char>(mask.back()) | (1U << core % 8));
  }
  return mask;
}

}  // namespace

HostInfo read_host_info() {
  return {.name = read_host_name(),
          .boot_id = read_boot_id(),
          .pid = ::getpid(),
          .num_cores = num_usable_cores(),
          .core_mask = mask_of(usable_cores())};
}

int num_usable_cores() {
  const cpu_set_t cores = usable_cores();
  return std::max(1, CPU_COUNT(&cores));
}

int num_online_cores() {
  return std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace cadre::os
