// Limits the memory of processes of a test by a cgroup. If they need more, the kernel reclaims
// pages of files (writes them back or drops them), or it kills one of the processes with SIGKILL.
//
// Threads: one owner. Blocking: the destructor waits until the kernel has released the processes
// that were in the cgroup, 2 s at most. Lifetime: the destructor removes the cgroup. Errors: if
// is_there() is false, reason() says why: no permission to make a cgroup, or no memory controller.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <fstream>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

class MemoryCgroup {
 public:
  // Makes a cgroup inside that of this process. `name` must be unique among the cgroups of this
  // process.
  MemoryCgroup(const std::string& name, size_t num_bytes) {
    std::ifstream own("/proc/self/cgroup");
    for (std::string line; std::getline(own, line);) {
      if (const size_t at = line.find(":memory:"); at != std::string::npos) {
        make("/sys/fs/cgroup/memory" + line.substr(at + 8), name, "memory.limit_in_bytes",
             "memory.memsw.limit_in_bytes", format("{}", num_bytes), num_bytes);
        return;
      }
    }
    own = std::ifstream("/proc/self/cgroup");
    for (std::string line; std::getline(own, line);) {
      if (line.starts_with("0::")) {
        make("/sys/fs/cgroup" + line.substr(3), name, "memory.max", "memory.swap.max", "0",
             num_bytes);
      }
    }
  }
  ~MemoryCgroup() {
    if (!is_there_) return;
    const auto system = os::make_native_system();
    const auto waiter = system->make_waiter();
    for (int i = 0; i < 100 && ::rmdir(path_.c_str()) != 0; ++i) {
      waiter->park(system->deadline_in(std::chrono::milliseconds(20)));
    }
  }
  MemoryCgroup(const MemoryCgroup&) = delete;
  MemoryCgroup& operator=(const MemoryCgroup&) = delete;

  bool is_there() const { return is_there_; }
  const std::string& reason() const { return reason_; }
  // Moves the calling process into the cgroup permanently.
  void enter() const {
    require(write("cgroup.procs", format("{}", ::getpid())), "cannot enter " + path_);
  }
  // Returns the peak memory usage that the kernel reports, in bytes.
  std::string peak() const {
    for (const char* name : {"memory.max_usage_in_bytes", "memory.peak"}) {
      std::string text;
      if (std::ifstream(path_ + "/" + name) >> text) return text;
    }
    return "unknown";
  }

 private:
  void make(const std::string& parent, const std::string& name, const char* limit_file,
            const char* swap_file, const std::string& swap, size_t num_bytes) {
    path_ = format("{}/cadre-test-{}-{}", parent, ::getpid(), name);
    is_there_ = ::mkdir(path_.c_str(), 0755) == 0;
    if (is_there_ && write(limit_file, format("{}", num_bytes))) {
      write(swap_file, swap);  // the file exists only if the kernel accounts swap
      return;
    }
    reason_ = format("cannot limit memory with {}/{}", path_, limit_file);
    if (is_there_) ::rmdir(path_.c_str());
    is_there_ = false;
  }
  bool write(const std::string& file, const std::string& text) const {
    std::ofstream out(path_ + "/" + file);
    out << text;
    out.flush();
    return out.good();
  }

  std::string path_;
  std::string reason_ = "no cgroup file system at /sys/fs/cgroup";
  bool is_there_ = false;
};

}  // namespace cadre::testing
