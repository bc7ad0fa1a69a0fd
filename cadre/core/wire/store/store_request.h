// A request to a Store and its response, as values. A Store executes requests (store/store.h), and
// the protocol sends them to a server (store_message.h).
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
// Cadre's own. docs/guide/reference/store.md says what each verb does, and which keys and values it
// has. Verbs that act on a connection (is_of_connection) are never passed to a Store.
enum class StoreVerb : uint8_t {
  kValidate,  // acts on a connection: the first request of a c10d client
  kSet,
  kCompareSet,
  kGet,  // answered once the key is set, as are kWait and kMultiGet
  kAdd,
  kCheck,
  kWait,
  kNumKeys,
  kErase,
  kAppend,
  kMultiGet,
  kMultiSet,
  kCancel,  // acts on a connection: cancels its pending request
  kPing,    // acts on a connection: answered with the number that was sent
  kQueuePush,
  // StoreResponse::number is the length of the queue before the call; 0 means no item.
  kTryQueuePop,
  kQueueLength,
  kListKeys,
  kBarrier,  // StoreRequest::amount is the number of calls for which it waits

  // Acts on a connection: the build and nonce of a client that will prove it has the token.
  kHello = 0xC0,
  kProve,        // acts on a connection: the proof that the client has the job's token
  kQueuePop,     // answered when there is an item
  kLeaveWill,    // acts on a connection: when it ends, the server appends the value to the key
  kRetractWill,  // acts on a connection: retracts the value of kLeaveWill
};
inline constexpr int kNumC10dVerbs = 19;
inline constexpr int kNumOwnVerbs = 5;

CADRE_EXPORT std::string_view to_string(StoreVerb verb);

struct StoreRequest {
  StoreVerb verb = StoreVerb::kSet;
  int64_t amount = 0;  // used by kAdd and kBarrier
  std::vector<std::string> keys;
  std::vector<std::string> values;  // compare_set has two values: the expected and the desired one

  friend bool operator==(const StoreRequest&, const StoreRequest&) = default;
};

struct StoreResponse {
  std::optional<Error> error;  // if set, the other members are empty
  int64_t number = 0;          // the sum for add, 0 or 1 for check and erase, else a count
  std::vector<std::string> values;

  friend bool operator==(const StoreResponse&, const StoreResponse&) = default;
};

}  // namespace cadre::wire
