#include "cadre/core/comm/messages/message_header.h"

#include <algorithm>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr uint32_t kMagic = 0x324d4443;  // "CDM2"

Error malformed(std::string_view field, uint64_t value) {
  return Error(ErrorCode::kCorruption,
               cadre::format("header of a message: {} is {:#x}, which no rank of this version "
                             "sends; check that all ranks run the same build",
                             field, value));
}

}  // namespace

std::array<std::byte, MessageHeader::kBytes> MessageHeader::encode() const {
  wire::ByteWriter writer;
  writer.integer(kMagic);
  writer.integer(kind);
  writer.integer(dtype);
  writer.integer(uint16_t{0});
  writer.integer(tag);
  writer.integer(space);
  writer.integer(sequence);
  writer.integer(num_bytes);
  std::array<std::byte, kBytes> bytes;
  std::ranges::copy(writer.bytes(), bytes.begin());
  return bytes;
}

Result<MessageHeader> MessageHeader::parse(ConstBytes bytes) {
  wire::ByteReader reader(bytes);
  const auto magic = reader.integer<uint32_t>();
  if (magic != kMagic) return malformed("the magic", magic);
  const auto kind = reader.integer<uint8_t>();
  if (kind > static_cast<uint8_t>(Kind::kData)) return malformed("the kind", kind);
  const auto dtype = reader.integer<uint8_t>();
  if (dtype >= kNumDTypes) return malformed("the dtype", dtype);
  const auto reserved = reader.integer<uint16_t>();
  if (reserved != 0) return malformed("a reserved field", reserved);
  MessageHeader header{.kind = static_cast<Kind>(kind), .dtype = static_cast<DType>(dtype)};
  header.tag = reader.integer<int32_t>();
  header.space = reader.integer<uint32_t>();
  header.sequence = reader.integer<uint64_t>();
  header.num_bytes = reader.integer<uint64_t>();
  if (!reader.is_complete()) return malformed("the length", bytes.size());
  // A size that is too large for an eager message is refused, because the receiver allocates memory
  // for such a message before it has the payload.
  const bool is_short = header.num_bytes <= kMaxEagerBytes;
  if ((header.kind == Kind::kEager) != is_short) return malformed("the size", header.num_bytes);
  return header;
}

}  // namespace cadre
