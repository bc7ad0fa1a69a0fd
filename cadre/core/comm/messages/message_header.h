// Parses and writes the header that precedes each message of send and recv on a channel.
//
// Threads: any. Blocking: never. Errors: kCorruption for bytes that no rank of this build sends.
// The format is described in docs/formats/point-to-point.md; message_header_fuzz.cpp fuzzes the
// parser.
#pragma once

#include <array>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"

namespace cadre {

struct MessageHeader {
  static constexpr size_t kBytes = 32;
  // The size up to which a message is sent at once, whether or not a receive waits for it.
  static constexpr uint64_t kMaxEagerBytes = 16 << 10;

  enum class Kind : uint8_t {
    kEager = 0,    // the message follows
    kRequest = 1,  // a longer message waits at the sender
    kClear = 2,    // the receiver is ready for the message of that sequence
    kData = 3,     // the message of that sequence follows
  };

  Kind kind = Kind::kEager;
  DType dtype = DType::kUint8;
  int32_t tag = 0;
  uint64_t sequence = 0;  // counts the messages from the sender to the receiver
  uint64_t num_bytes = 0;
  uint32_t space = 0;  // MessageSpace::number()

  std::array<std::byte, kBytes> encode() const;
  // REQUIRES: bytes.size() == kBytes.
  static Result<MessageHeader> parse(ConstBytes bytes);
  friend bool operator==(const MessageHeader&, const MessageHeader&) = default;
};

}  // namespace cadre
