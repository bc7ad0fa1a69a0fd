#include "cadre/core/store/table_answers.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/store/checks.h"

namespace cadre::store {
namespace {

using wire::StoreRequest;
using wire::StoreResponse;
using wire::StoreVerb;

constexpr size_t kBytesPerValue = sizeof(uint64_t);  // the size of the length that precedes a value

StoreResponse answer_read(const KeyTable& table, const StoreRequest& request, size_t max_bytes) {
  StoreResponse response;
  size_t num_bytes = 0;
  for (const std::string& key : request.keys) {
    Result<std::string> value = table.read(key);
    if (!value.ok()) return {.error = value.error()};
    response.values.push_back(std::move(value).value());
    num_bytes += kBytesPerValue + response.values.back().size();
    if (num_bytes <= max_bytes) continue;
    return {.error = Error(ErrorCode::kInvalidArgument,
                           format("store {} of {} keys has an answer over the limit of {} bytes; "
                                  "ask for fewer keys at once",
                                  wire::to_string(request.verb), request.keys.size(), max_bytes))};
  }
  return response;
}

StoreResponse answer_list(const KeyTable& table, size_t max_bytes) {
  StoreResponse response{.values = table.list_keys()};
  if (max_bytes == std::numeric_limits<size_t>::max()) return response;
  size_t num_bytes = 0;
  for (const std::string& key : response.values) num_bytes += kBytesPerValue + key.size();
  if (num_bytes <= max_bytes && response.values.size() <= wire::kMaxKeysPerRequest) return response;
  return {.error = Error(
              ErrorCode::kInvalidArgument,
              format("store list_keys: {} keys of {} bytes are over the limit of {} "
                     "keys and {} bytes for one answer",
                     response.values.size(), num_bytes, wire::kMaxKeysPerRequest, max_bytes))};
}

StoreResponse answer_item(KeyTable& table, const std::string& queue) {
  StoreResponse response{.number = table.queue_length(queue)};
  if (auto item = table.pop(queue)) response.values.push_back(*std::move(item));
  return response;
}

StoreResponse response_of(const Status& status) {
  if (status.ok()) return {};
  return {.error = status.error()};
}

StoreResponse response_of(const Result<int64_t>& number) {
  if (number.ok()) return {.number = *number};
  return {.error = number.error()};
}

StoreResponse response_of(const Result<std::string>& value) {
  if (value.ok()) return {.values = {*value}};
  return {.error = value.error()};
}

Status set_all(KeyTable& table, const StoreRequest& request) {
  for (size_t i = 0; i < request.keys.size(); ++i) {
    CADRE_RETURN_IF_ERROR(table.set(request.keys[i], request.values[i]));
  }
  return {};
}

}  // namespace

StoreResponse answer_from(KeyTable& table, const StoreRequest& request, size_t max_bytes) {
  const auto& keys = request.keys;
  const auto& values = request.values;
  switch (request.verb) {
    case StoreVerb::kGet:
    case StoreVerb::kMultiGet:
      return answer_read(table, request, max_bytes);
    case StoreVerb::kWait:
      return {};
    case StoreVerb::kCheck:
      return {.number = table.has_all(keys) ? 1 : 0};
    case StoreVerb::kNumKeys:
      return {.number = table.num_keys()};
    case StoreVerb::kListKeys:
      return answer_list(table, max_bytes);
    case StoreVerb::kQueueLength:
      return {.number = table.queue_length(keys[0])};
    case StoreVerb::kSet:
    case StoreVerb::kMultiSet:
      return response_of(set_all(table, request));
    case StoreVerb::kAppend:
      return response_of(table.append(keys[0], values[0]));
    case StoreVerb::kAdd:
      return response_of(table.add(keys[0], request.amount));
    case StoreVerb::kCompareSet:
      return response_of(table.compare_set(keys[0], values[0], values[1]));
    case StoreVerb::kErase:
      return {.number = table.erase(keys[0]) ? 1 : 0};
    case StoreVerb::kQueuePush:
      return response_of(table.push(keys[0], values[0]));
    case StoreVerb::kQueuePop:
    case StoreVerb::kTryQueuePop:
      return answer_item(table, keys[0]);
    default:
      break;
  }
  return {.error =
              Error(ErrorCode::kInternal, format("the verb {} cannot be answered from a key table",
                                                 wire::to_string(request.verb)))};
}

Error timeout_from(const KeyTable& table, const StoreRequest& request) {
  if (request.verb == StoreVerb::kBarrier) {
    const std::string* count = table.find(request.keys[0]);
    return Error(ErrorCode::kTimeout,
                 format("store barrier \"{}\": {} of {} calls had arrived at the deadline; a rank "
                        "is late or gone",
                        request.keys[0], count == nullptr ? "0" : *count, request.amount));
  }
  std::vector<std::string> missing;
  for (const std::string& key : request.keys) {
    if (!table.has_all({&key, 1})) missing.push_back(key);
  }
  return store_timeout(request, missing);
}

}  // namespace cadre::store
