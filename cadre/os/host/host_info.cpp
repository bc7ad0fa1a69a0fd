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

}  // namespace

HostInfo read_host_info() {
  return {.name = read_host_name(),
          .boot_id = read_boot_id(),
          .pid = ::getpid(),
          .num_cores = num_usable_cores()};
}

int num_usable_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  // Fails on machines with more than 1024 cores; there the count of all is near enough.
  if (::sched_getaffinity(0, sizeof(mask), &mask) == 0) return std::max(1, CPU_COUNT(&mask));
  return std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace cadre::os
