// A call of a Store and its answer, as values: what a Store implements (store/store.h), and what
// the native protocol carries (store_message.h).
//
// Threads: plain values. Blocking: never. Errors: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::wire {

// What each verb does, and which keys and values it has: docs/guide/reference/store.md. kCancel,
// kLeaveWill and kRetractWill belong to a connection: a Store never gets them.
enum class StoreVerb : uint8_t {
  kSet,
  kGet,  // once the key is set; kWait and kMultiGet likewise
  kAdd,
  kWait,
  kCheck,
  kCompareSet,
  kErase,
  kNumKeys,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancel,  // answers the request with this id with a timeout, if it still waits
  kQueuePush,
  kQueuePop,     // once there is an item
  kTryQueuePop,  // number: 1 with an item, 0 without
  kQueueLength,
  kListKeys,
  kBarrier,    // amount: the number of arrivals
  kLeaveWill,  // when this connection ends without a retraction, the value is appended to the key
  kRetractWill,
};
inline constexpr int kNumStoreVerbs = 20;

CADRE_EXPORT std::string_view to_string(StoreVerb verb);

struct StoreRequest {
  uint64_t id = 0;
  StoreVerb verb = StoreVerb::kSet;
  int64_t amount = 0;  // for kAdd and kBarrier
  std::vector<std::string> keys;
  std::vector<std::string> values;  // compare_set: expected, desired

  friend bool operator==(const StoreRequest&, const StoreRequest&) = default;
};

struct StoreResponse {
  uint64_t id = 0;
  std::optional<Error> error;  // then the rest is empty
  int64_t number = 0;          // add: the sum; check, erase, try_queue_pop: 0 or 1; else a count
  std::vector<std::string> values;

  friend bool operator==(const StoreResponse&, const StoreResponse&) = default;
};

}  // namespace cadre::wire
