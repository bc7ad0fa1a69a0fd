// The frames by which the streams of many groups share one data connection between two processes.
//
// Threads: any. Blocking: never. Errors: kCorruption for bytes that no process of this build sends.
// The format is documented in docs/formats/link-frames.md; link_frame_fuzz.cpp fuzzes the parser.
// The rules come from HTTP/2 (RFC 9113, section 5.2): a window for each stream, and credits.
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
  // A frame that the kernel takes only in part is kept in memory, so the payload is limited.
  static constexpr uint32_t kMaxPayloadBytes = 64 << 10;
  // The largest number of bytes by which a sender may be ahead of what the receiver's group has
  // taken.
  static constexpr uint32_t kWindowBytes = 4 << 20;

  enum class Kind : uint8_t {
    kOpen = 0,    // is the first frame of the end that has connected: both ends have the connection
    kData = 1,    // `length` bytes of the stream follow
    kCredit = 2,  // the stream's receiver has taken `length` bytes
    kClose = 3,   // the sender has closed its end of the stream
    kProbe = 4,   // asks whether the receiver has closed its end; it then answers with a close
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
