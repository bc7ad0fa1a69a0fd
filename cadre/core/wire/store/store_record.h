// The records in the file of a FileStore: the changes of its keys, in order
// (docs/formats/store-file.md).
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

// The first bytes of the file of a FileStore.
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
  std::string key;    // empty for kJoin
  std::string value;  // used by kSet, kAppend and kPush

  friend bool operator==(const StoreRecord&, const StoreRecord&) = default;
};

// The result of decode_store_record().
struct DecodedStoreRecord {
  // nullopt if the record is incomplete because its writer was killed. It is then the last one of
  // the file.
  std::optional<StoreRecord> record;
  // The size of the record; for an incomplete one, the number of bytes that it needs at least.
  size_t num_bytes = 0;
};

CADRE_EXPORT std::vector<std::byte> encode(const StoreRecord& record);

// Decodes the first record in `rest`, which must end where the file ends. A record with a wrong
// checksum counts as incomplete if it is the last one; if bytes follow it, it is an error.
CADRE_EXPORT Result<DecodedStoreRecord> decode_store_record(ConstBytes rest);

}  // namespace cadre::wire
