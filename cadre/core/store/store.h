// A small key-value store through which the ranks of a job find each other.
//
// Each verb (operation) takes the time that it may last. If the program passes a Duration, for
// example 10s, the verb returns its result or throws cadre::Error. If it passes a Deadline, the
// verb returns a Result. If the duration is 0 or negative, the verb does not wait.
// Threads: every method may be called from any thread; a call that blocks in one thread does not
// delay the calls of other threads. Blocking: every method, at most for the given time; half a
// second longer if the server of a TcpStore does not answer.
// Lifetime: values are copies; the System must outlive the store. Errors: kTimeout names the keys
// that are missing; kPeerLost if the process with the server has ended; kInvalidArgument for a key
// or value over the limits below.
// Source: c10d's Store with all verbs of torch 2.13. It has no set_timeout(), because each call has
// its own timeout.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/wire/store/store_request.h"

namespace cadre {

namespace os {
class System;
}  // namespace os

inline constexpr size_t kMaxStoreKeyBytes = 4096;
inline constexpr size_t kMaxStoreValueBytes = 16 << 20;
// A rank that has waited this long for the store, or for other ranks, logs a warning.
inline constexpr Duration kStoreWarnTime = std::chrono::seconds(10);

// The time of a call: a Duration from now, or a Deadline.
template <typename Time>
concept StoreTime = std::same_as<Time, Deadline> || std::convertible_to<Time, Duration>;

// A call with a Duration returns a T and throws errors; a call with a Deadline returns a Result<T>.
template <StoreTime Time, typename T>
using StoreResult = std::conditional_t<std::same_as<Time, Deadline>, Result<T>, T>;

// A key and a value that the store publishes if this process dies. Destroying the object retracts
// them.
class CADRE_EXPORT StoreWill {
 public:
  virtual ~StoreWill() = default;
};

// The verbs (get(), set(), ...) are templates that make requests from their arguments; an
// implementation answers these requests in answer(). A class that wraps another store, for example
// to add a prefix, also overrides answer() only.
class CADRE_EXPORT Store {
 public:
  // The System is the clock by which the timeouts of calls are measured.
  explicit Store(os::System& system) : system_(&system) {}
  virtual ~Store() = default;

  template <StoreTime Time>
  StoreResult<Time, void> set(std::string_view key, std::string_view value, Time time) {
    return ask(&status_of,
               {.verb = Verb::kSet, .keys = {std::string(key)}, .values = {std::string(value)}},
               time);
  }
  // Waits until the key is set, and returns its value.
  template <StoreTime Time>
  StoreResult<Time, std::string> get(std::string_view key, Time time) {
    return ask(&value_of, {.verb = Verb::kGet, .keys = {std::string(key)}}, time);
  }
  // Adds `amount` to a decimal counter and returns the new value. An absent key counts as 0.
  template <StoreTime Time>
  StoreResult<Time, int64_t> add(std::string_view key, int64_t amount, Time time) {
    return ask(&number_of, {.verb = Verb::kAdd, .amount = amount, .keys = {std::string(key)}},
               time);
  }
  // Waits until all keys are set.
  template <StoreTime Time>
  StoreResult<Time, void> wait(std::span<const std::string> keys, Time time) {
    return ask(&status_of, {.verb = Verb::kWait, .keys = {keys.begin(), keys.end()}}, time);
  }
  // Returns whether all keys are set at present.
  template <StoreTime Time>
  StoreResult<Time, bool> check(std::span<const std::string> keys, Time time) {
    return ask(&flag_of, {.verb = Verb::kCheck, .keys = {keys.begin(), keys.end()}}, time);
  }
  // Sets `desired` if the value equals `expected`, or if the key is absent and `expected` is empty;
  // returns the value after the call (`expected` for an absent key that was not set).
  template <StoreTime Time>
  StoreResult<Time, std::string> compare_set(std::string_view key, std::string_view expected,
                                             std::string_view desired, Time time) {
    return ask(&value_of,
               {.verb = Verb::kCompareSet,
                .keys = {std::string(key)},
                .values = {std::string(expected), std::string(desired)}},
               time);
  }
  // Returns whether the key existed.
  template <StoreTime Time>
  StoreResult<Time, bool> erase(std::string_view key, Time time) {
    return ask(&flag_of, {.verb = Verb::kErase, .keys = {std::string(key)}}, time);
  }
  template <StoreTime Time>
  StoreResult<Time, int64_t> num_keys(Time time) {
    return ask(&number_of, {.verb = Verb::kNumKeys}, time);
  }
  // Appends `value` to the value of the key. An absent key counts as an empty value.
  template <StoreTime Time>
  StoreResult<Time, void> append(std::string_view key, std::string_view value, Time time) {
    return ask(&status_of,
               {.verb = Verb::kAppend, .keys = {std::string(key)}, .values = {std::string(value)}},
               time);
  }
  // Waits until all keys are set, then returns their values in the order of `keys`, in one round
  // trip.
  template <StoreTime Time>
  StoreResult<Time, std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                                        Time time) {
    return ask(&values_of, {.verb = Verb::kMultiGet, .keys = {keys.begin(), keys.end()}}, time);
  }
  template <StoreTime Time>
  StoreResult<Time, void> multi_set(std::span<const std::string> keys,
                                    std::span<const std::string> values, Time time) {
    return ask(&status_of,
               {.verb = Verb::kMultiSet,
                .keys = {keys.begin(), keys.end()},
                .values = {values.begin(), values.end()}},
               time);
  }
  // Returns the sorted list of all keys that are set. Names of queues are not included.
  template <StoreTime Time>
  StoreResult<Time, std::vector<std::string>> list_keys(Time time) {
    return ask(&values_of, {.verb = Verb::kListKeys}, time);
  }

  // FIFO queues of values. A queue has a name, and names of queues are separate from keys. But
  // wait() and check() treat a queue that is not empty as a key that is set.
  template <StoreTime Time>
  StoreResult<Time, void> queue_push(std::string_view queue, std::string_view value, Time time) {
    return ask(
        &status_of,
        {.verb = Verb::kQueuePush, .keys = {std::string(queue)}, .values = {std::string(value)}},
        time);
  }
  // Waits until there is an item, removes it from the queue and returns it. Each item goes to one
  // caller.
  template <StoreTime Time>
  StoreResult<Time, std::string> queue_pop(std::string_view queue, Time time) {
    return ask(&value_of, {.verb = Verb::kQueuePop, .keys = {std::string(queue)}}, time);
  }
  // Removes and returns the first item without waiting; nullopt if the queue is empty.
  template <StoreTime Time>
  StoreResult<Time, std::optional<std::string>> try_queue_pop(std::string_view queue, Time time) {
    return ask(&item_of, {.verb = Verb::kTryQueuePop, .keys = {std::string(queue)}}, time);
  }
  template <StoreTime Time>
  StoreResult<Time, int64_t> queue_length(std::string_view queue, Time time) {
    return ask(&number_of, {.verb = Verb::kQueueLength, .keys = {std::string(queue)}}, time);
  }

  // Waits until `num_arrivals` calls were made with this key. This takes one request; a barrier
  // from add() and wait() would take two. Each barrier needs its own key. A call that timed out
  // still counts as arrived.
  template <StoreTime Time>
  StoreResult<Time, void> barrier(std::string_view key, int64_t num_arrivals, Time time) {
    return ask(&status_of,
               {.verb = Verb::kBarrier, .amount = num_arrivals, .keys = {std::string(key)}}, time);
  }

  // If this process dies before it has destroyed the result, the store appends `value` to the value
  // of the key. Returns null if the store cannot detect the death, as a HashStore, a FileStore and
  // a TcpStore with c10d's protocol.
  virtual Result<std::unique_ptr<StoreWill>> leave_will(std::string_view /*key*/,
                                                        std::string_view /*value*/,
                                                        Deadline /*deadline*/) {
    return std::unique_ptr<StoreWill>();
  }

  // Returns another handle to the same keys, which shares no connection with this one.
  virtual Result<std::shared_ptr<Store>> clone(Deadline deadline) = 0;

  // Executes a request of any verb except leave_will(). Returns an error if the request exceeds the
  // limits, or if the response has an error.
  Result<wire::StoreResponse> call(wire::StoreRequest request, Deadline deadline);

  os::System& system() const { return *system_; }

 protected:
  // Converts the timeout of a verb to a deadline.
  static Deadline deadline_of(os::System& system, Duration timeout);
  template <std::integral Rep, typename Period>
  static Deadline deadline_of(os::System& system, std::chrono::duration<Rep, Period> timeout) {
    return deadline_of(system, to_duration(timeout));
  }
  static Deadline deadline_of(os::System&, Deadline deadline) { return deadline; }
  template <StoreTime Time, typename T>
  static StoreResult<Time, T> finish(Result<T> result, Time) {
    if constexpr (std::same_as<Time, Deadline>) {
      return result;
    } else {
      return std::move(result).value_or_throw();
    }
  }

 private:
  using Verb = wire::StoreVerb;

  // Executes a request. `request` is within the limits. The response has the values that the verb
  // promises, or an error (cadre/core/wire/store/store_message.h).
  virtual Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) = 0;

  template <StoreTime Time, typename T>
  StoreResult<Time, T> ask(Result<T> (*read)(Result<wire::StoreResponse>),
                           wire::StoreRequest request, Time time) {
    return finish(read(call(std::move(request), deadline_of(*system_, time))), time);
  }

  // These functions convert a response to the result of a verb.
  static Status status_of(Result<wire::StoreResponse> response);
  static Result<bool> flag_of(Result<wire::StoreResponse> response);
  static Result<int64_t> number_of(Result<wire::StoreResponse> response);
  static Result<std::string> value_of(Result<wire::StoreResponse> response);
  static Result<std::vector<std::string>> values_of(Result<wire::StoreResponse> response);
  static Result<std::optional<std::string>> item_of(Result<wire::StoreResponse> response);

  os::System* system_;
};

}  // namespace cadre
