// The receiving half of a data connection: headers, and payload straight into its stream's memory.
//
// Threads: one at a time. Blocking: never. Lifetime: borrows the socket.
// Errors: of the socket; kCorruption for a header that is none. The connection is useless then.
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

  // The next header, if it was read in whole. REQUIRES: num_left() == 0.
  Result<std::optional<wire::LinkFrame>> next();
  // Payload bytes of the current frame that were not taken yet.
  size_t num_left() const { return num_left_; }
  // Those of them that were read together with the header; borrowed until the next read.
  ConstBytes take_buffered(size_t at_most);
  bool has_buffered() const { return num_left_ > 0 && begin_ < end_; }

  // Reads a header and, so that a short message needs no second system call, payload with it: not
  // more than the receiver expects, because behind it other frames begin. 0 when nothing is there
  // just now. REQUIRES: num_left() == 0, and next() has none.
  Result<size_t> read_ahead(size_t num_expected);
  // Reads payload of the current frame into `target`, and the header behind it if it ends there.
  // REQUIRES: has_buffered() is false, num_left() > 0, target is not empty.
  Result<size_t> read_payload(Bytes target);

 private:
  // As much payload as a short message of the net engine has (Link::kInlineBytes).
  static constexpr size_t kBytesAhead = 4096 + 64;

  os::Socket& socket_;
  size_t num_left_ = 0;
  std::array<std::byte, wire::LinkFrame::kBytes + kBytesAhead> inbox_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace cadre
