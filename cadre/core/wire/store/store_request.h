// A request to a Store and its answer, as values: a Store implements them (store/store.h), and the
// protocol of the store carries them (store_message.h).
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

// The number of each verb on the wire. Verbs up to kBarrier are c10d's, those from kHello on are
// Cadre's own. docs/guide/reference/store.md says what each does, and which keys and values it has.
// Verbs about a connection (is_of_connection) are never passed to a Store.
enum class StoreVerb : uint8_t {
  kValidate,  // about a connection: the first request of a c10d client
  kSet,
  kCompareSet,
  kGet,  // answered once the key is set; kWait and kMultiGet likewise
  kAdd,
  kCheck,
  kWait,
  kNumKeys,
  kErase,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancel,  // about a connection: ends its pending request
  kPing,    // about a connection
  kQueuePush,
  kTryQueuePop,  // number: length of the queue before the call; 0: no item
  kQueueLength,
  kListKeys,
  kBarrier,  // amount: the number of arrivals

  kHello = 0xC0,  // about a connection: build and nonce of a client that will prove the job's token
  kProve,         // about a connection
  kQueuePop,      // answered once there is an item
  kLeaveWill,     // about a connection: when the connection ends, the value is appended to the key
  kRetractWill,   // about a connection
};
inline constexpr int kNumC10dVerbs = 19;
inline constexpr int kNumOwnVerbs = 5;

CADRE_EXPORT std::string_view to_string(StoreVerb verb);

struct StoreRequest {
  StoreVerb verb = StoreVerb::kSet;
  int64_t amount = 0;  // is used by kAdd and kBarrier
  std::vector<std::string> keys;
  std::vector<std::string> values;  // compare_set has two values: the expected and the desired one

  friend bool operator==(const StoreRequest&, const StoreRequest&) = default;
};

struct StoreResponse {
  std::optional<Error> error;  // if it is set, the other members are empty
  int64_t number = 0;          // the sum for add, 0 or 1 for check and erase, else a count
  std::vector<std::string> values;

  friend bool operator==(const StoreResponse&, const StoreResponse&) = default;
};

}  // namespace cadre::wire
