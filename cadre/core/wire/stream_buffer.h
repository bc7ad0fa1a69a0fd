// A queue of bytes between a socket and a parser.
//
// Threads: one owner. Blocking: never. Lifetime: views are valid until the next append or consume.
#pragma once

#include <cstddef>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

// A first-in, first-out buffer. Consuming a byte has a constant amortized cost.
class CADRE_EXPORT StreamBuffer {
 public:
  void append(ConstBytes bytes);
  // Adds this many bytes at the end and returns them, so that the caller can write into them. The
  // caller must then call drop_last() with the number of bytes that it has not written.
  Bytes extend(size_t num_bytes);
  void drop_last(size_t num_bytes);
  ConstBytes view() const { return ConstBytes(data_).subspan(begin_); }
  size_t size() const { return data_.size() - begin_; }
  bool empty() const { return size() == 0; }
  // REQUIRES: num_bytes <= size().
  void consume(size_t num_bytes);

 private:
  void move_to_front();

  std::vector<std::byte> data_;
  size_t begin_ = 0;
};

}  // namespace cadre::wire
