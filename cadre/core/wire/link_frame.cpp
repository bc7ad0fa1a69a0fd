#include "cadre/core/wire/link_frame.h"

#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

constexpr uint16_t kMagic = 0x4c43;  // "CL"
constexpr int kKindShift = 16;
constexpr int kPurposeShift = 24;
constexpr int kLengthShift = 32;

Error malformed(std::string_view field, uint64_t value) {
  return Error(ErrorCode::kCorruption,
               cadre::format("frame of a data connection: {} is {:#x}, which no process of this "
                             "version sends; check that all ranks run the same build",
                             field, value));
}

bool is_allowed_length(LinkFrame::Kind kind, uint32_t length) {
  switch (kind) {
    case LinkFrame::Kind::kData:
      return length > 0 && length <= LinkFrame::kMaxPayloadBytes;
    case LinkFrame::Kind::kCredit:
      return length > 0 && length <= LinkFrame::kWindowBytes;
    default:
      return length == 0;
  }
}

}  // namespace

// A header has two 64-bit words. The first one consists of magic (16 bits), kind (8), purpose (8)
// and length (32); the second one is the group.
std::array<std::byte, LinkFrame::kBytes> LinkFrame::encode() const {
  std::array<std::byte, kBytes> bytes;
  store_word(bytes.data(), kMagic | uint64_t{static_cast<uint8_t>(kind)} << kKindShift |
                               uint64_t{purpose} << kPurposeShift |
                               uint64_t{length} << kLengthShift);
  store_word(bytes.data() + sizeof(uint64_t), group);
  return bytes;
}

Result<LinkFrame> LinkFrame::parse(ConstBytes bytes) {
  const uint64_t first = load_word(bytes.data());
  const auto magic = static_cast<uint16_t>(first);
  if (magic != kMagic) return malformed("the magic", magic);
  const auto kind = static_cast<uint8_t>(first >> kKindShift);
  if (kind > static_cast<uint8_t>(Kind::kProbe)) return malformed("the kind", kind);
  const LinkFrame frame{.kind = static_cast<Kind>(kind),
                        .purpose = static_cast<uint8_t>(first >> kPurposeShift),
                        .length = static_cast<uint32_t>(first >> kLengthShift),
                        .group = load_word(bytes.data() + sizeof(first))};
  if (!is_allowed_length(frame.kind, frame.length)) return malformed("the length", frame.length);
  const bool has_stream = frame.purpose != 0 || frame.group != 0;
  if (frame.kind == Kind::kOpen && has_stream) return malformed("the group", frame.group);
  return frame;
}

}  // namespace cadre::wire
