// Shared memory of which only a given number of bytes can be reserved, as on a host that has run
// out of memory.
//
// Threads: one thread. Lifetime: shares the inner memory. Errors: reserve() returns kUnavailable if
// too little is left.
#pragma once

#include <memory>
#include <utility>

#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/shared_pages.h"

namespace cadre::testing {

class ScarceMemory final : public os::SharedMemory, public os::SharedPages {
 public:
  ScarceMemory(std::shared_ptr<os::SharedMemory> inner, size_t num_free)
      : inner_(std::move(inner)), num_free_(num_free) {}

  Bytes bytes() const override { return inner_->bytes(); }
  Status reserve(size_t, size_t num_bytes) override {
    if (num_bytes > num_free_) return Error(ErrorCode::kUnavailable, "no memory");
    num_free_ -= num_bytes;
    return {};
  }
  Status make_private(size_t, size_t) override { return {}; }
  Status release(size_t begin, size_t num_bytes) override {
    num_free_ += num_bytes;
    return os::release_pages(*inner_, begin, num_bytes);
  }
  Result<std::unique_ptr<os::SharedMemory>> map_ranges(std::span<const size_t>, size_t) override {
    return Error(ErrorCode::kUnavailable, "no addresses");
  }

 private:
  std::shared_ptr<os::SharedMemory> inner_;
  size_t num_free_;
};

}  // namespace cadre::testing
