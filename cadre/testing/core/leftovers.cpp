#include "cadre/testing/core/leftovers.h"

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>
#include <thread>

#include "cadre/core/base/format.h"
#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::testing {
namespace {

namespace fs = std::filesystem;

int num_entries(const char* folder) {
  int count = 0;
  for ([[maybe_unused]] const fs::directory_entry& entry : fs::directory_iterator(folder)) ++count;
  return count;
}

// Returns the pid of a process's parent, from /proc/PID/stat: "pid (name) state ppid ...". The name
// may contain any character, so the fields are counted from the last parenthesis. Returns 0 if the
// process has ended.
int parent_of(const fs::path& process) {
  std::ifstream stat(process / "stat");
  std::string line;
  std::getline(stat, line);
  const size_t close = line.rfind(") ");
  if (close == std::string::npos) return 0;
  return std::atoi(line.c_str() + close + 4);
}

int count_children() {
  const int self = ::getpid();
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (parent_of(entry.path()) == self) ++count;
  }
  return count;
}

int count_segments() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:cadre") != std::string::npos) ++count;
  }
  return count;
}

// ThreadSanitizer starts a background thread when a process starts its first thread. That thread
// must not be counted as one that a test has leaked, so it is made to start here.
void let_sanitizer_start_its_thread() {
#ifdef __SANITIZE_THREAD__
  std::thread([] {}).join();
  os::sleep_until(Deadline(os::monotonic_now() + std::chrono::milliseconds(2)));
#endif
}

std::string describe(int before, int after, std::string_view what) {
  return after <= before ? "" : cadre::format("{} more {}; ", after - before, what);
}

std::string compare(const Resources& before, const Resources& after) {
  return describe(before.num_fds, after.num_fds, "descriptors") +
         describe(before.num_threads, after.num_threads, "threads") +
         describe(before.num_children, after.num_children, "child processes") +
         describe(before.num_segments, after.num_segments, "mapped segments");
}

}  // namespace

Resources count_resources() {
  let_sanitizer_start_its_thread();
  return {.num_fds = num_entries("/proc/self/fd"),
          .num_threads = num_entries("/proc/self/task"),
          .num_children = count_children(),
          .num_segments = count_segments()};
}

std::string leftovers_since(const Resources& before) {
  const Deadline deadline(os::monotonic_now() + std::chrono::milliseconds(500));
  for (;;) {
    std::string text = compare(before, count_resources());
    const TimePoint now = os::monotonic_now();
    if (text.empty() || deadline.has_passed(now)) return text;
    os::sleep_until(Deadline(now + std::chrono::milliseconds(5)));
  }
}

int64_t committed_shared_bytes() {
  // The key is the inode, so that a segment that is open twice counts once.
  std::map<ino_t, int64_t> segments;
  for (const fs::directory_entry& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code failure;
    const std::string target = fs::read_symlink(entry.path(), failure).string();
    struct stat info {};
    if (target.find("/memfd:cadre") == std::string::npos) continue;
    if (::stat(entry.path().c_str(), &info) == 0) {
      segments[info.st_ino] = info.st_blocks * int64_t{512};
    }
  }
  int64_t sum = 0;
  for (const auto& [segment, num_bytes] : segments) sum += num_bytes;
  return sum;
}

}  // namespace cadre::testing
