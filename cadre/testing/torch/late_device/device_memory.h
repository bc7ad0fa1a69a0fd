// The memory of the late devices, and their caching allocator.
//
// Tensors hold addresses of a mapping without access rights (PROT_NONE), so a host that reads or
// writes them gets SIGSEGV, and a system call fails with EFAULT. Streams work on a second mapping
// of the same pages. Bytes that nothing has written, and freed bytes, are 0xFF: NaN in floating
// point, -1 in signed integers.
//
// A block belongs to the stream that was current when it was allocated. free() makes it available
// to that stream at once, and to no other stream. For a block that other streams used,
// record_stream() delays this until they have run what was enqueued when the block was freed.
// Blocks are not divided, merged or returned.
//
// Threads: any. Blocking: never. Lifetime: that of the process. Errors: c10::OutOfMemoryError.
// Source: CUDACachingAllocator of PyTorch.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cadre/testing/torch/late_device/stream_queue.h"

namespace cadre::testing::late {

// The two mappings of the memory of all devices.
class MappedMemory {
 public:
  // Address space of one device. Pages are used when they are written.
  static constexpr size_t kDeviceBytes = size_t{1} << 30;

  MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  char* device_address(int device, size_t offset) const {
    return device_ + static_cast<size_t>(device) * kDeviceBytes + offset;
  }
  // Returns the address by which streams access the memory. Throws c10::Error for an address that
  // is not one of a late device.
  char* host_address(const void* device_address) const;
  // Returns the device index of the address, or -1.
  int device_of(const void* device_address) const;

 private:
  char* device_ = nullptr;
  char* host_ = nullptr;
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  DeviceAllocator(const MappedMemory& memory, StreamTable& streams);

  // Allocates on the current device, for its current stream.
  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*mempool*/) override {}
  // Ignores, without an error, a DataPtr with another deleter, as CUDA's allocator does.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  // Counted are allocation, allocated_bytes (what was asked for), active, active_bytes (whole
  // blocks), reserved_bytes and num_ooms.
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
  // See late_device.h.
  void fail_allocations(int device, std::function<bool(size_t num_bytes)> fails);

 private:
  struct Block {
    void* address = nullptr;
    size_t num_bytes = 0;
    size_t asked_bytes = 0;  // at most num_bytes: a reused block may be larger than needed
    int device = 0;
    int stream = 0;
    std::set<int> users = {};  // other streams, from recordStream()
  };
  struct FreedBlock {
    Block block;
    std::vector<std::shared_ptr<Event>> uses;
  };
  static void free(void* address);
  void free_block(void* address);
  void fail_if_told(int device, size_t num_bytes);
  Block take_block(size_t num_bytes, int device, int stream);
  void make_available(const Block& block);
  void collect_freed();
  c10::CachingDeviceAllocator::DeviceStats& stats(int device) {
    return stats_.at(static_cast<size_t>(device));
  }

  const MappedMemory& memory_;
  StreamTable& streams_;
  std::mutex mutex_;  // guards the members below
  std::map<std::pair<int, int>, std::multimap<size_t, void*>> available_;  // key: device, stream
  std::unordered_map<void*, Block> blocks_;
  std::vector<FreedBlock> freed_;  // other streams still use them
  std::array<size_t, kNumDevices> used_bytes_{};
  std::array<std::function<bool(size_t num_bytes)>, kNumDevices> fails_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kNumDevices> stats_{};
};

}  // namespace cadre::testing::late
