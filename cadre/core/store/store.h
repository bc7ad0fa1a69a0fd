// A small key-value store through which the ranks of a job find each other.
//
// Threads: every method may be called from any thread; a blocking call of one thread does not delay
// another's. Blocking: every method until its Deadline at most; at a server that does not answer
// (TcpStore), half a second longer.
// Lifetime: values are copies. Errors: kTimeout names the keys that are missing; kPeerLost when
// the server is gone; kInvalidArgument for a key or value over the limits below.
// Source: the verbs are c10d's Store, all of torch 2.13 but the handle's own timeout: here every
// call has its Deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre {

namespace wire {
struct StoreRequest;
struct StoreResponse;
}  // namespace wire

inline constexpr size_t kMaxStoreKeyBytes = 4096;
inline constexpr size_t kMaxStoreValueBytes = 16 << 20;
// A rank that waits so long for the store, or at the store for other ranks, says so in its log.
inline constexpr Duration kStoreWarnTime = std::chrono::seconds(10);

// What a process has left with a store for the case of its death. Destroying it retracts it.
class CADRE_EXPORT StoreWill {
 public:
  virtual ~StoreWill() = default;
};

// An implementation answers requests; the verbs make requests of their arguments. Whatever stands
// between a caller and a store, for example a prefix, overrides answer() alone.
class CADRE_EXPORT Store {
 public:
  virtual ~Store() = default;

  Status set(std::string_view key, std::string_view value, Deadline deadline);
  // Waits until the key is set.
  Result<std::string> get(std::string_view key, Deadline deadline);
  // Adds to a decimal counter (absent: 0) and returns the new value.
  Result<int64_t> add(std::string_view key, int64_t amount, Deadline deadline);
  // Waits until all keys are set.
  Status wait(std::span<const std::string> keys, Deadline deadline);
  // Whether all keys are set at present.
  Result<bool> check(std::span<const std::string> keys, Deadline deadline);
  // Sets `desired` if the value equals `expected`, or if the key is absent and `expected` is empty;
  // returns the value after the call (`expected` for an absent key that was not set).
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired, Deadline deadline);
  // Whether the key was there.
  Result<bool> erase(std::string_view key, Deadline deadline);
  Result<int64_t> num_keys(Deadline deadline);
  // Appends to the value (absent: empty).
  Status append(std::string_view key, std::string_view value, Deadline deadline);
  // Waits for all keys, then returns their values in order, in one round trip.
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys, Deadline deadline);
  Status multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                   Deadline deadline);
  // The keys that are set, sorted. Queues are not among them.
  Result<std::vector<std::string>> list_keys(Deadline deadline);

  // Queues of values, first in, first out, each under a name of its own; apart from the keys, but a
  // queue that is not empty counts as a key that is set for wait() and check().
  Status queue_push(std::string_view queue, std::string_view value, Deadline deadline);
  // Waits until there is an item, and takes it; each item goes to one caller.
  Result<std::string> queue_pop(std::string_view queue, Deadline deadline);
  // Without waiting; nullopt when the queue is empty.
  Result<std::optional<std::string>> try_queue_pop(std::string_view queue, Deadline deadline);
  Result<int64_t> queue_length(std::string_view queue, Deadline deadline);

  // Waits until `num_arrivals` calls were made with this key, in one step where add() and wait()
  // are two. A key serves one barrier; a call that timed out has arrived all the same.
  Status barrier(std::string_view key, int64_t num_arrivals, Deadline deadline);

  // When this process dies before it has destroyed the result, `value` is appended to the key. Null
  // where nobody would notice the death: in one process, in a file, and over c10d's protocol.
  virtual Result<std::unique_ptr<StoreWill>> leave_will(std::string_view /*key*/,
                                                        std::string_view /*value*/,
                                                        Deadline /*deadline*/) {
    return std::unique_ptr<StoreWill>();
  }

  // Another handle on the same keys, which shares no connection with this one.
  virtual Result<std::shared_ptr<Store>> clone(Deadline deadline) = 0;

  // Any verb but leave_will(), as a value: refuses a request over the limits, and has it answered.
  // An error in the response becomes the result.
  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline);

 private:
  // `request` is within the limits; the response has the values that its verb promises, or an
  // error (cadre/core/wire/store/store_message.h).
  virtual Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) = 0;
};

}  // namespace cadre
