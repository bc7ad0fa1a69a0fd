// The receiving half of a data connection. It reads headers, and payload directly into the memory
// of its stream.
//
// Threads: one at a time. Blocking: never. Lifetime: borrows the socket.
// Errors: those of the socket; kCorruption for an invalid header. The connection is useless then.
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

  // Returns the next header; nullopt if it has not been read completely. REQUIRES: num_left() == 0.
  Result<std::optional<wire::LinkFrame>> next();
  // Returns how many payload bytes of the current frame have not been taken.
  size_t num_left() const { return num_left_; }
  // Takes payload bytes that were read together with the header. They stay valid until the next
  // read.
  ConstBytes take_buffered(size_t at_most);
  bool has_buffered() const { return num_left_ > 0 && begin_ < end_; }

  // Reads a header, and payload with it, so that a short message needs no second system call. It
  // reads no more than the receiver expects, because the next bytes belong to other frames. Returns
  // 0 if nothing has arrived. REQUIRES: num_left() == 0, and next() returns nullopt.
  Result<size_t> read_ahead(size_t num_expected);
  // Reads payload of the current frame into `target`, and the next header if `target` reaches the
  // end of the frame. Returns the payload bytes.
  // REQUIRES: has_buffered() is false, num_left() > 0, target is not empty.
  Result<size_t> read_payload(Bytes target);

 private:
  // The room for the payload of a short message of the net engine (Link::kInlineBytes).
  static constexpr size_t kBytesAhead = 4096 + 64;

  os::Socket& socket_;
  size_t num_left_ = 0;
  std::array<std::byte, wire::LinkFrame::kBytes + kBytesAhead> inbox_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace cadre
