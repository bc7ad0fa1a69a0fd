// Memory for the intermediate results of operations. It grows to the largest size requested so far
// and is never shrunk, because the page faults of new memory cost more than an operation.
//
// Threads: one at a time. Lifetime: the bytes are valid until the next call of bytes(). Errors:
// std::bad_alloc; the buffer is then empty.
#pragma once

#include <cstddef>
#include <memory>

namespace cadre {

class GrowingBuffer {
 public:
  // Returns memory for this number of bytes. Its content is undefined.
  std::byte* bytes(size_t num_bytes) {
    if (num_bytes > size_) {
      size_ = 0;
      memory_.reset();
      memory_ = std::make_unique_for_overwrite<std::byte[]>(num_bytes);
      size_ = num_bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t size_ = 0;
};

}  // namespace cadre
