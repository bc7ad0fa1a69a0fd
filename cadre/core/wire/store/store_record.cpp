#include "cadre/core/wire/store/store_record.h"

#include <algorithm>
#include <array>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/challenge.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::wire {
namespace {

constexpr size_t kCheckBytes = 8;
constexpr size_t kHeaderBytes = sizeof(uint32_t) + kCheckBytes;
constexpr size_t kMinBodyBytes = 1 + 2 * sizeof(uint32_t);
constexpr size_t kMaxBodyBytes = kMinBodyBytes + kMaxKeyBytes + kMaxValueBytes;

using Check = std::array<std::byte, kCheckBytes>;

// Returns a checksum that distinguishes complete records from partly written ones. Its key is not a
// secret.
Check check_of(ConstBytes body) {
  const Result<Digest> digest = hmac_sha256("cadre store record", body);
  Check check{};
  if (digest.ok()) std::copy_n(digest->begin(), kCheckBytes, check.begin());
  return check;
}

bool is_all_zero(ConstBytes bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

std::optional<StoreRecord> decode_body(ConstBytes body) {
  ByteReader reader(body);
  const auto verb = reader.integer<uint8_t>();
  if (verb >= kNumStoreRecordVerbs) return std::nullopt;
  StoreRecord record{.verb = static_cast<StoreRecordVerb>(verb)};
  record.key = reader.text(kMaxKeyBytes);
  record.value = reader.text(kMaxValueBytes);
  if (!reader.is_complete()) return std::nullopt;
  return record;
}

}  // namespace

std::vector<std::byte> encode(const StoreRecord& record) {
  ByteWriter body;
  body.integer(record.verb);
  body.text(record.key);
  body.text(record.value);
  ByteWriter writer;
  writer.integer(static_cast<uint32_t>(body.bytes().size()));
  writer.raw(check_of(body.bytes()));
  writer.raw(body.bytes());
  return writer.take();
}

Result<DecodedStoreRecord> decode_store_record(ConstBytes rest) {
  ByteReader reader(rest);
  const auto num_body_bytes = reader.integer<uint32_t>();
  Check check{};
  reader.raw(check);
  if (!reader.ok()) return DecodedStoreRecord{.num_bytes = kHeaderBytes};
  const size_t num_bytes = kHeaderBytes + num_body_bytes;
  const bool is_possible = num_body_bytes >= kMinBodyBytes && num_body_bytes <= kMaxBodyBytes;
  if (is_possible && rest.size() < num_bytes) return DecodedStoreRecord{.num_bytes = num_bytes};
  // A power failure may leave zeros after the bytes that were written to the file. Such zeros count
  // as an incomplete record.
  if (!is_possible && is_all_zero(rest)) return DecodedStoreRecord{.num_bytes = kHeaderBytes};
  if (is_possible) {
    const ConstBytes body = rest.subspan(kHeaderBytes, num_body_bytes);
    if (check_of(body) == check) {
      if (auto record = decode_body(body)) {
        return DecodedStoreRecord{std::move(record), num_bytes};
      }
    } else if (rest.size() == num_bytes) {
      return DecodedStoreRecord{.num_bytes = num_bytes};
    }
  }
  return Error(ErrorCode::kCorruption,
               format("a record of {} bytes has a wrong length or checksum, and {} bytes follow it",
                      num_body_bytes, rest.size() - std::min(rest.size(), num_bytes)));
}

}  // namespace cadre::wire
