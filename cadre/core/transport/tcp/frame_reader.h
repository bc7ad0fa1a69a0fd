// The receiving half of a data connection. It reads headers into a buffer, and payload directly
// into the memory that the caller gives.
//
// Threads: one at a time. Blocking: never. Lifetime: borrows the socket.
// Errors: those of the socket; kCorruption for an invalid header. After an error the connection is
// unusable.
#pragma once

#include <array>
#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/wire/link_frame.h"

namespace cadre {

class FrameReader {
 public:
  explicit FrameReader(os::Socket& socket) : socket_(socket) {}

  // Returns the next header; nullopt if the buffer does not contain all of it. REQUIRES: num_left()
  // == 0.
  Result<std::optional<wire::LinkFrame>> next();
  // Returns how many payload bytes of the current frame were not yet returned to the caller.
  size_t num_left() const { return num_left_; }
  // Returns payload bytes that were read into the buffer together with the header. The span is
  // valid until the next read.
  ConstBytes take_buffered(size_t at_most);
  bool has_buffered() const { return num_left_ > 0 && begin_ < end_; }

  // Reads a header and the payload after it into the buffer, so that a short message needs one
  // system call. Reads at most `num_expected` payload bytes, because the bytes after these belong
  // to other frames. Returns the number of bytes, 0 if none has arrived. REQUIRES: num_left() == 0,
  // and next() returns nullopt.
  Result<size_t> read_ahead(size_t num_expected);
  // Reads payload of the current frame into `target`, and the next header if `target` reaches the
  // end of the frame. Returns the number of payload bytes.
  // REQUIRES: has_buffered() is false, num_left() > 0, target is not empty.
  Result<size_t> read_payload(Bytes target);

 private:
  // The space for the payload of a short message of the net engine (Link::kInlineBytes).
  static constexpr size_t kBytesAhead = 4096 + 64;

  os::Socket& socket_;
  size_t num_left_ = 0;
  std::array<std::byte, wire::LinkFrame::kBytes + kBytesAhead> inbox_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace cadre
