#include "cadre/core/collective/net/message.h"

#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre {
namespace {

constexpr uint32_t kMagic = 0x334f4443;  // "CDO3"

// Writes fields one after the other, low byte first. Allocates nothing, because it runs for every
// message.
class HeaderWriter {
 public:
  template <typename T>
  HeaderWriter& put(T value) {
    const auto bits = static_cast<uint64_t>(value);
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_[at_++] = static_cast<std::byte>(bits >> (8 * i));
    }
    return *this;
  }
  const std::array<std::byte, OperationHeader::kBytes>& bytes() const { return bytes_; }

 private:
  std::array<std::byte, OperationHeader::kBytes> bytes_{};
  size_t at_ = 0;
};

Error malformed(std::string_view field, uint64_t value) {
  return Error(ErrorCode::kCorruption,
               cadre::format("header of an operation: {} is {:#x}, which no rank of this version "
                             "sends; check that all ranks run the same build",
                             field, value));
}

bool is_algorithm(uint8_t value) {
  return value >= static_cast<uint8_t>(Algorithm::kRing) &&
         value <= static_cast<uint8_t>(Algorithm::kPairwise);
}

}  // namespace

std::array<std::byte, OperationHeader::kBytes> OperationHeader::encode() const {
  HeaderWriter writer;
  writer.put(kMagic).put(kind).put(algorithm).put(uint16_t{0});
  writer.put(number).put(fingerprint.call).put(fingerprint.shape);
  return writer.bytes();
}

Result<OperationHeader> OperationHeader::parse(ConstBytes bytes) {
  wire::ByteReader reader(bytes);
  const auto magic = reader.integer<uint32_t>();
  if (magic != kMagic) return malformed("the magic", magic);
  const auto kind = reader.integer<uint8_t>();
  if (kind > static_cast<uint8_t>(Kind::kAnnouncement)) return malformed("the kind", kind);
  const auto algorithm = reader.integer<uint8_t>();
  if (!is_algorithm(algorithm)) return malformed("the algorithm", algorithm);
  const auto reserved = reader.integer<uint16_t>();
  if (reserved != 0) return malformed("a reserved field", reserved);
  OperationHeader header{.kind = static_cast<Kind>(kind),
                         .algorithm = static_cast<Algorithm>(algorithm)};
  header.number = reader.integer<uint64_t>();
  header.fingerprint.call = reader.integer<uint64_t>();
  header.fingerprint.shape = reader.integer<uint64_t>();
  if (!reader.is_complete()) return malformed("the length", bytes.size());
  return header;
}

}  // namespace cadre
