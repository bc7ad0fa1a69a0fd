// The frames with which the streams of many groups share one data connection between two processes.
//
// Threads: any. Blocking: never. Errors: kCorruption for bytes that no process of this build sends.
// The format is documented in docs/formats/link-frames.md; link_frame_fuzz.cpp fuzzes the parser.
// Flow control is that of HTTP/2 (RFC 9113, section 5.2): each stream has a window, and the
// receiver gives credit for bytes that it has taken.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

struct CADRE_EXPORT LinkFrame {
  static constexpr size_t kBytes = 16;
  // The largest payload of a frame. It is limited because the rest of a partly sent frame is
  // copied.
  static constexpr uint32_t kMaxPayloadBytes = 64 << 10;
  // The window of a stream: the largest number of bytes that were sent and for which the receiver
  // has not yet given credit.
  static constexpr uint32_t kWindowBytes = 4 << 20;

  enum class Kind : uint8_t {
    // The first frame of the process that has opened the connection. The other process sends no
    // frame before it has arrived.
    kOpen = 0,
    kData = 1,    // `length` bytes of the stream follow
    kCredit = 2,  // the stream's receiver has taken `length` bytes
    kClose = 3,   // the sender of this frame has closed its end of the stream
    // Asks whether the peer has closed its end of the stream; if so, it answers with kClose.
    kProbe = 4,
  };

  Kind kind = Kind::kOpen;
  uint8_t purpose = 0;
  uint32_t length = 0;
  uint64_t group = 0;

  std::array<std::byte, kBytes> encode() const;
  // REQUIRES: bytes.size() == kBytes.
  static Result<LinkFrame> parse(ConstBytes bytes);
  friend bool operator==(const LinkFrame&, const LinkFrame&) = default;
};

}  // namespace cadre::wire
