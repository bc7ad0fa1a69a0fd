#include "cadre/core/store/store.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/checks.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {

static_assert(kMaxStoreKeyBytes == wire::kMaxKeyBytes);
static_assert(kMaxStoreValueBytes == wire::kMaxValueBytes);

namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// The number of values that the response of a verb has.
size_t num_values_of(StoreVerb verb, size_t num_keys) {
  switch (verb) {
    case StoreVerb::kGet:
    case StoreVerb::kCompareSet:
    case StoreVerb::kQueuePop:
      return 1;
    case StoreVerb::kMultiGet:
      return num_keys;
    default:
      return 0;
  }
}

std::vector<std::string> to_strings(std::span<const std::string> texts) {
  return {texts.begin(), texts.end()};
}

StoreRequest request_of(StoreVerb verb, std::string_view key) {
  return {.verb = verb, .keys = {std::string(key)}};
}

StoreRequest request_of(StoreVerb verb, std::string_view key, std::string_view value) {
  return {.verb = verb, .keys = {std::string(key)}, .values = {std::string(value)}};
}

Status status_of(const Result<StoreResponse>& response) {
  return response.ok() ? Status() : response.error();
}

Result<int64_t> number_of(const Result<StoreResponse>& response) {
  if (!response.ok()) return response.error();
  return response->number;
}

Result<bool> flag_of(const Result<StoreResponse>& response) {
  if (!response.ok()) return response.error();
  return response->number == 1;
}

Result<std::string> value_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  return std::move(response->values.front());
}

Result<std::vector<std::string>> values_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  return std::move(response->values);
}

}  // namespace

Result<StoreResponse> Store::call(StoreRequest request, Deadline deadline) {
  CADRE_RETURN_IF_ERROR(check_store_request(request));
  const StoreVerb verb = request.verb;
  const size_t num_expected = num_values_of(verb, request.keys.size());
  Result<StoreResponse> response = answer(std::move(request), deadline);
  if (!response.ok()) return response;
  if (response->error) return *response->error;
  if (num_expected == 0 || response->values.size() == num_expected) return response;
  return Error(ErrorCode::kCorruption,
               format("the store answered {} with {} values, expected {}", wire::to_string(verb),
                      response->values.size(), num_expected));
}

Status Store::set(std::string_view key, std::string_view value, Deadline deadline) {
  return status_of(call(request_of(StoreVerb::kSet, key, value), deadline));
}

Result<std::string> Store::get(std::string_view key, Deadline deadline) {
  return value_of(call(request_of(StoreVerb::kGet, key), deadline));
}

Result<int64_t> Store::add(std::string_view key, int64_t amount, Deadline deadline) {
  return number_of(
      call({.verb = StoreVerb::kAdd, .amount = amount, .keys = {std::string(key)}}, deadline));
}

Status Store::wait(std::span<const std::string> keys, Deadline deadline) {
  return status_of(call({.verb = StoreVerb::kWait, .keys = to_strings(keys)}, deadline));
}

Result<bool> Store::check(std::span<const std::string> keys, Deadline deadline) {
  return flag_of(call({.verb = StoreVerb::kCheck, .keys = to_strings(keys)}, deadline));
}

Result<std::string> Store::compare_set(std::string_view key, std::string_view expected,
                                       std::string_view desired, Deadline deadline) {
  return value_of(call({.verb = StoreVerb::kCompareSet,
                        .keys = {std::string(key)},
                        .values = {std::string(expected), std::string(desired)}},
                       deadline));
}

Result<bool> Store::erase(std::string_view key, Deadline deadline) {
  return flag_of(call(request_of(StoreVerb::kErase, key), deadline));
}

Result<int64_t> Store::num_keys(Deadline deadline) {
  return number_of(call({.verb = StoreVerb::kNumKeys}, deadline));
}

Status Store::append(std::string_view key, std::string_view value, Deadline deadline) {
  return status_of(call(request_of(StoreVerb::kAppend, key, value), deadline));
}

Result<std::vector<std::string>> Store::multi_get(std::span<const std::string> keys,
                                                  Deadline deadline) {
  return values_of(call({.verb = StoreVerb::kMultiGet, .keys = to_strings(keys)}, deadline));
}

Status Store::multi_set(std::span<const std::string> keys, std::span<const std::string> values,
                        Deadline deadline) {
  return status_of(
      call({.verb = StoreVerb::kMultiSet, .keys = to_strings(keys), .values = to_strings(values)},
           deadline));
}

Result<std::vector<std::string>> Store::list_keys(Deadline deadline) {
  return values_of(call({.verb = StoreVerb::kListKeys}, deadline));
}

Status Store::queue_push(std::string_view queue, std::string_view value, Deadline deadline) {
  return status_of(call(request_of(StoreVerb::kQueuePush, queue, value), deadline));
}

Result<std::string> Store::queue_pop(std::string_view queue, Deadline deadline) {
  return value_of(call(request_of(StoreVerb::kQueuePop, queue), deadline));
}

Result<std::optional<std::string>> Store::try_queue_pop(std::string_view queue, Deadline deadline) {
  Result<StoreResponse> response = call(request_of(StoreVerb::kTryQueuePop, queue), deadline);
  if (!response.ok()) return response.error();
  if (response->number == 0 || response->values.empty()) return std::optional<std::string>();
  return std::optional(std::move(response->values.front()));
}

Result<int64_t> Store::queue_length(std::string_view queue, Deadline deadline) {
  return number_of(call(request_of(StoreVerb::kQueueLength, queue), deadline));
}

Status Store::barrier(std::string_view key, int64_t num_arrivals, Deadline deadline) {
  return status_of(call(
      {.verb = StoreVerb::kBarrier, .amount = num_arrivals, .keys = {std::string(key)}}, deadline));
}

}  // namespace cadre
