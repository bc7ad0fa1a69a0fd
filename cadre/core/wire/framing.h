// Splits a stream of bytes into messages: a queue of bytes, and frames of a 32-bit length and a
// payload.
//
// Threads: one owner. Blocking: never. Lifetime: views are valid until the next append or consume.
// Errors: kCorruption for a frame over the limit; the stream is then unusable.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

// Bytes in, bytes out, in order; consuming is cheap.
class CADRE_EXPORT StreamBuffer {
 public:
  void append(ConstBytes bytes);
  // Adds so many bytes at the end and returns them for writing. Then call drop_last() with the
  // number of bytes that were not written.
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

inline constexpr size_t kFrameHeaderBytes = 4;

// Appends a frame around `payload`. REQUIRES: payload.size() < 2^32.
CADRE_EXPORT void append_frame(StreamBuffer& out, ConstBytes payload);

// Returns the payload of the first whole frame, borrowed from the buffer; nullopt: more bytes are
// needed. Consume kFrameHeaderBytes + payload.size() bytes after using it.
CADRE_EXPORT Result<std::optional<ConstBytes>> peek_frame(const StreamBuffer& buffer,
                                                          size_t max_payload_bytes);

}  // namespace cadre::wire
