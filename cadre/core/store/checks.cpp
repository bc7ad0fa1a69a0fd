#include "cadre/core/store/checks.h"

#include <algorithm>

#include "cadre/core/base/format.h"
#include "cadre/core/store/store.h"

namespace cadre {

namespace {

using wire::StoreRequest;
using wire::StoreVerb;

Status check_key(std::string_view key) {
  if (key.size() <= kMaxStoreKeyBytes) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("store key of {} bytes, which begins \"{}\", is over the limit of {} bytes; "
                      "use a shorter key",
                      key.size(), key.substr(0, 64), kMaxStoreKeyBytes));
}

// Returns, for example, "key "a"", "key "b" and 2 more of 7 keys".
std::string list_missing(std::span<const std::string> missing, size_t num_keys) {
  if (missing.empty()) return format("{} keys", num_keys);
  constexpr size_t kMaxNamed = 4;
  const size_t num_named = std::min(missing.size(), kMaxNamed);
  std::string names;
  for (const std::string& key : missing.first(num_named)) {
    names += format("{}\"{}\"", names.empty() ? "" : ", ", key);
  }
  const size_t num_more = missing.size() - num_named;
  const std::string more = num_more == 0 ? std::string() : format(" and {} more", num_more);
  const std::string all = num_keys == 1 ? std::string() : format(" of {} keys", num_keys);
  return format("key{} {}{}{}", missing.size() == 1 ? "" : "s", names, more, all);
}

}  // namespace

Status check_store_entry(std::string_view key, std::string_view value) {
  CADRE_RETURN_IF_ERROR(check_key(key));
  if (value.size() <= kMaxStoreValueBytes) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("value of {} bytes for store key \"{}\" is over the limit of {} bytes; the "
                      "store is for addresses and small facts, send data through a group",
                      value.size(), key, kMaxStoreValueBytes));
}

Status check_store_request(const StoreRequest& request) {
  const auto& [verb, amount, keys, values] = request;
  const Status shape = wire::check_shape(request);
  if (!shape.ok()) return Error(ErrorCode::kInvalidArgument, shape.error().message());
  if (wire::is_of_connection(verb)) {
    return Error(ErrorCode::kInvalidArgument,
                 format("the verb {} acts on a connection to a server and is no request to a "
                        "store; use leave_will()",
                        wire::to_string(verb)));
  }
  if (keys.size() > wire::kMaxKeysPerRequest) {
    return Error(ErrorCode::kInvalidArgument,
                 format("store {} of {} keys is over the limit of {} keys for one call; split it",
                        wire::to_string(verb), keys.size(), wire::kMaxKeysPerRequest));
  }
  for (const std::string& key : keys) CADRE_RETURN_IF_ERROR(check_key(key));
  for (size_t i = 0; i < values.size(); ++i) {
    CADRE_RETURN_IF_ERROR(check_store_entry(keys[std::min(i, keys.size() - 1)], values[i]));
  }
  if (verb == StoreVerb::kBarrier && amount < 1) {
    return Error(
        ErrorCode::kInvalidArgument,
        format("store barrier \"{}\" of {} arrivals; expected at least 1", keys[0], amount));
  }
  return {};
}

Status check_not_forked(const os::ForkMark& mark, StoreVerb verb) {
  if (!mark.is_in_child()) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("store {}: this process is a forked child, whose copy of the store shares "
                      "the parent's connections and locks; open a store of its own, for example "
                      "by clone()",
                      wire::to_string(verb)));
}

Error store_timeout(const StoreRequest& request, std::span<const std::string> missing) {
  const std::string_view verb = wire::to_string(request.verb);
  const std::string key = request.keys.empty() ? std::string() : request.keys.front();
  switch (request.verb) {
    case StoreVerb::kGet:
    case StoreVerb::kWait:
    case StoreVerb::kMultiGet:
      return Error(ErrorCode::kTimeout,
                   format("store {}: the deadline passed while waiting for {}; the rank that sets "
                          "it is late or gone",
                          verb, list_missing(missing, request.keys.size())));
    case StoreVerb::kQueuePop:
      return Error(ErrorCode::kTimeout,
                   format("store {}: queue \"{}\" had no item for this call until the deadline; "
                          "the rank that pushes is late or gone",
                          verb, key));
    case StoreVerb::kBarrier:
      return Error(ErrorCode::kTimeout,
                   format("store {} \"{}\": the deadline passed before {} calls had arrived; a "
                          "rank is late or gone",
                          verb, key, request.amount));
    default:
      return Error(
          ErrorCode::kTimeout,
          format("store {} \"{}\": no answer from the store before the deadline", verb, key));
  }
}

}  // namespace cadre
