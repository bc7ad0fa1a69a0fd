// Measures the memory of a process: the exact allocations of libtorch, and the memory that the
// kernel reports.
//
// For tests and benches. Threads: any; an allocation, and its end in any thread, counts for the
// rank that the allocating thread has set. Blocking: reads /proc. Lifetime: install() is permanent.
// Errors: cadre::Error if the kernel does not report these values.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cadre/core/base/error.h"

namespace cadre::testing {

// The CPU allocator of libtorch, with a count of bytes for each rank.
class CountedMemory final : public c10::Allocator {
 public:
  static constexpr int kMaxRanks = 64;

  // Installs this allocator in libtorch; only the first call has an effect.
  static CountedMemory& install() {
    static CountedMemory counted(*c10::GetCPUAllocator());
    static const bool is_set = [] {
      c10::SetCPUAllocator(&counted, /*priority=*/100);
      return true;
    }();
    static_cast<void>(is_set);
    return counted;
  }

  // Sets the rank of later allocations of the calling thread.
  static void set_rank(int rank) { rank_of_thread() = rank; }

  int64_t bytes(int rank) const {
    const std::lock_guard lock(mutex_);
    return counts_[rank].bytes;
  }
  // Returns the maximum of the rank's allocated bytes since reset_peak().
  int64_t peak_bytes(int rank) const {
    const std::lock_guard lock(mutex_);
    return counts_[rank].peak;
  }
  void reset_peak(int rank) {
    const std::lock_guard lock(mutex_);
    counts_[rank].peak = counts_[rank].bytes;
  }

  c10::DataPtr allocate(size_t num_bytes) override {
    c10::DataPtr memory = below_.allocate(num_bytes);
    if (memory.get() == nullptr) return memory;
    {
      const std::lock_guard lock(mutex_);
      const int rank = rank_of_thread();
      blocks_[memory.get()] = {.bytes = static_cast<int64_t>(num_bytes), .rank = rank};
      Count& count = counts_[rank];
      count.bytes += static_cast<int64_t>(num_bytes);
      count.peak = std::max(count.peak, count.bytes);
    }
    void* const data = memory.release_context();
    return {data, data, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

 private:
  struct Count {
    int64_t bytes = 0;
    int64_t peak = 0;
  };
  struct Block {
    int64_t bytes = 0;
    int rank = 0;
  };

  explicit CountedMemory(c10::Allocator& below) : below_(below) {}

  // The rank is thread-local, because libtorch passes no context to allocate(), and each rank is a
  // thread.
  static int& rank_of_thread() {
    thread_local int rank = 0;
    return rank;
  }

  static void free_counted(void* data) {
    CountedMemory& self = install();
    {
      const std::lock_guard lock(self.mutex_);
      const auto found = self.blocks_.find(data);
      if (found != self.blocks_.end()) {
        self.counts_[found->second.rank].bytes -= found->second.bytes;
        self.blocks_.erase(found);
      }
    }
    self.below_.raw_deleter()(data);
  }

  c10::Allocator& below_;
  mutable std::mutex mutex_;
  std::array<Count, kMaxRanks> counts_;
  std::unordered_map<void*, Block> blocks_;
};

// Proportional set size: a page that n processes map counts 1/n in each, so the sum over processes
// is the memory that they hold together.
struct ProportionalSize {
  int64_t total_bytes = 0;
  int64_t shared_bytes = 0;  // memory that the ranks of a host share
};

inline int64_t kilobytes_of(const std::string& line) {
  return std::stoll(line.substr(line.find(':') + 1)) * 1024;
}

// Returns the Pss over all mappings, as the kernel has summed it.
inline int64_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Pss:")) return kilobytes_of(line);
  }
  throw Error(ErrorCode::kUnavailable, "/proc/self/smaps_rollup has no Pss");
}

// Sums the Pss over the mappings one by one, to report shared memory separately. Slower than
// proportional_bytes().
inline ProportionalSize proportional_size() {
  ProportionalSize size;
  std::ifstream file("/proc/self/smaps");
  bool is_shared = false;
  for (std::string line; std::getline(file, line);) {
    if (line.find("/memfd:cadre") != std::string::npos) {
      is_shared = true;
    } else if (!line.empty() && (line[0] < 'A' || line[0] > 'Z')) {
      is_shared = false;  // the first line of a mapping begins with its address
    }
    if (!line.starts_with("Pss:")) continue;
    size.total_bytes += kilobytes_of(line);
    if (is_shared) size.shared_bytes += kilobytes_of(line);
  }
  if (size.total_bytes == 0) throw Error(ErrorCode::kUnavailable, "/proc/self/smaps has no Pss");
  return size;
}

}  // namespace cadre::testing
