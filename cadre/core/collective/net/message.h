// The header by which ranks frame operations on their channels: parse and write.
//
// Threads: any. Blocking: never. Errors: kCorruption for bytes that no rank of this build sends.
// The format stands in docs/formats/net-messages.md; message_fuzz.cpp fuzzes the parser.
#pragma once

#include <array>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fingerprint.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/net/schedule.h"

namespace cadre {

// Before each message of an operation that one rank sends to another.
struct OperationHeader {
  static constexpr size_t kBytes = 32;

  enum class Kind : uint8_t {
    kMessage = 0,       // a message of this operation follows
    kRefusal = 1,       // the sender runs this operation, saw another one here, and gives up
    kAnnouncement = 2,  // the sender waits in this operation; nothing of it follows yet
  };

  Kind kind = Kind::kMessage;
  Algorithm algorithm = Algorithm::kRing;
  uint64_t number = 0;
  Fingerprint fingerprint = {};

  std::array<std::byte, kBytes> encode() const;
  // REQUIRES: bytes.size() == kBytes.
  static Result<OperationHeader> parse(ConstBytes bytes);
  friend bool operator==(const OperationHeader&, const OperationHeader&) = default;
};

}  // namespace cadre
