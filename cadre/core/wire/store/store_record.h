// The records of a file store: the changes of its keys, in order (docs/formats/store-file.md).
//
// Threads: plain values. Blocking: never. Errors: kCorruption for bytes that no file store wrote.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

// The first bytes of the file.
inline constexpr std::string_view kStoreFileMagic = "CDRFILE1";

enum class StoreRecordVerb : uint8_t {
  kJoin,  // a rank has opened the store
  kSet,
  kAppend,
  kErase,
  kPush,
  kPop,
};
inline constexpr int kNumStoreRecordVerbs = 6;

struct StoreRecord {
  StoreRecordVerb verb = StoreRecordVerb::kJoin;
  std::string key;    // is empty for kJoin
  std::string value;  // is used by kSet, kAppend and kPush

  friend bool operator==(const StoreRecord&, const StoreRecord&) = default;
};

// The record at the beginning of a part of the file.
struct DecodedStoreRecord {
  // nullopt means that the record is torn because its writer was killed; it is the last one.
  std::optional<StoreRecord> record;
  // The size of the record; for an incomplete one, the fewest bytes that it needs.
  size_t num_bytes = 0;
};

CADRE_EXPORT std::vector<std::byte> encode(const StoreRecord& record);

// `rest` must end where the file ends. A record with a wrong checksum is torn if nothing follows
// it, and an error if something does.
CADRE_EXPORT Result<DecodedStoreRecord> decode_store_record(ConstBytes rest);

}  // namespace cadre::wire
