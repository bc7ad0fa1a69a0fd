#include "cadre/core/os/host/host_info.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/file_size.h"

namespace cadre::os {
namespace {

constexpr size_t kMaxBootIdBytes = 128;
constexpr size_t kMaxHostNameBytes = 256;

// The namespace is part of the host's identity, because abstract unix addresses are valid only
// within one network namespace.
std::string read_network_namespace() {
  struct stat info {};
  return ::stat("/proc/self/ns/net", &info) == 0 ? format("-net-{}", info.st_ino) : "";
}

std::string read_host_name() {
  std::array<char, kMaxHostNameBytes> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

// sched_getaffinity() fails on machines with more than 1024 cores; then all cores count as usable.
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

constexpr uint64_t kTebibyte = uint64_t{1} << 40;

// A sanitizer keeps shadow memory for each mapped address; ThreadSanitizer has room for less than
// 2 TiB of mappings in a process.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kMaxSegmentBytes = kTebibyte / 16;
#else
constexpr uint64_t kMaxSegmentBytes = 16 * kTebibyte;
#endif

// A segment is limited by the address space of the process and by its limit on file sizes.
uint64_t max_segment_bytes() {
  rlimit addresses{};
  const bool is_limited =
      ::getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY;
  return std::min({kMaxSegmentBytes, largest_file_bytes(),
                   is_limited ? addresses.rlim_cur / 4 : kMaxSegmentBytes});
}

uint64_t physical_memory_bytes() {
  const auto pages = ::sysconf(_SC_PHYS_PAGES);
  const auto page_bytes = ::sysconf(_SC_PAGESIZE);
  return static_cast<uint64_t>(std::max(pages, 1L)) * static_cast<uint64_t>(page_bytes);
}

}  // namespace

// The id is read once, because it never changes and connecting needs it several times.
const std::string& kernel_boot_id() {
  static const std::string id = [] {
    auto text = read_file("/proc/sys/kernel/random/boot_id", kMaxBootIdBytes).value_or_throw();
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }();
  return id;
}

HostInfo read_host_info() {
  return {.name = read_host_name(),
          .boot_id = kernel_boot_id() + read_network_namespace(),
          .pid = ::getpid(),
          .num_cores = num_usable_cores(),
          .core_mask = mask_of(usable_cores()),
          .memory_bytes = physical_memory_bytes(),
          .max_segment_bytes = max_segment_bytes()};
}

int num_usable_cores() {
  const cpu_set_t cores = usable_cores();
  return std::max(1, CPU_COUNT(&cores));
}

int num_online_cores() {
  return std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace cadre::os
