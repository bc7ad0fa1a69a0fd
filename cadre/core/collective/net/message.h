// Parses and writes the header that precedes each message of an operation on a channel between
// ranks.
//
// Threads: any. Blocking: never. Errors: kCorruption for bytes that no rank of this build sends.
// docs/formats/net-messages.md defines the format; message_fuzz.cpp fuzzes the parser.
#pragma once

#include <array>
#include <cstdint>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fingerprint.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/net/schedule.h"

namespace cadre {

// The header before each message that one rank sends to another in an operation.
struct OperationHeader {
  static constexpr size_t kBytes = 32;

  enum class Kind : uint8_t {
    kMessage = 0,  // a message of this operation follows
    kRefusal = 1,  // the sender runs this operation, received a header of another one, and gives up
    kAnnouncement = 2,  // the sender waits in this operation; no payload follows
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
