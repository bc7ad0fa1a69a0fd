#include "cadre/core/store/store.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/checks.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {

static_assert(kMaxStoreKeyBytes == wire::kMaxKeyBytes);
static_assert(kMaxStoreValueBytes == wire::kMaxValueBytes);

namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

// Returns the number of values that a response to this verb must have.
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

Deadline Store::deadline_of(os::System& system, Duration timeout) {
  return system.deadline_in(timeout);
}

Status Store::status_of(Result<StoreResponse> response) {
  return response.ok() ? Status() : response.error();
}

Result<bool> Store::flag_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  return response->number == 1;
}

Result<int64_t> Store::number_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  return response->number;
}

Result<std::string> Store::value_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  return std::move(response->values.front());
}

Result<std::vector<std::string>> Store::values_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  return std::move(response->values);
}

Result<std::optional<std::string>> Store::item_of(Result<StoreResponse> response) {
  if (!response.ok()) return response.error();
  if (response->number == 0 || response->values.empty()) return std::optional<std::string>();
  return std::optional(std::move(response->values.front()));
}

}  // namespace cadre
