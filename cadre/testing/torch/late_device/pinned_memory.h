// Pinned host memory of the late device: host memory whose addresses are known, so that copies
// from and to it need not wait.
//
// Freed memory is 0xFF and is used again at once, unless record_event() announced a stream that has
// yet to run: a program that frees or overwrites pinned memory too early gets wrong values.
//
// Threads: any. Blocking: never. Errors: std::bad_alloc. Source: CachingHostAllocator of PyTorch.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cadre/testing/torch/late_device/stream_queue.h"

namespace cadre::testing::late {

class PinnedAllocator final : public at::HostAllocator {
 public:
  explicit PinnedAllocator(StreamTable& streams) : streams_(streams) {}

  c10::DataPtr allocate(size_t num_bytes) override;
  bool contains(const void* address) const;
  // Keeps the memory at `address` from being used again until the stream has run what is enqueued
  // now. Returns false for memory that is not pinned.
  bool record_event(void* address, void* context, c10::Stream stream) override;
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override;
  void empty_cache() override {}
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

 private:
  struct Block {
    std::shared_ptr<char> memory;
    size_t num_bytes = 0;
    std::vector<std::shared_ptr<Event>> uses;
    bool is_free = false;
  };
  using Blocks = std::map<const char*, Block>;
  static void free(void* address);
  void free_block(void* address);
  static const Block* find(const Blocks& blocks, const void* address);

  StreamTable& streams_;
  mutable std::mutex mutex_;
  Blocks blocks_;  // key: address; includes free blocks
};

}  // namespace cadre::testing::late
