#include "cadre/store/checks.h"

#include <algorithm>

#include "cadre/base/format.h"
#include "cadre/store/store.h"

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
  const auto& [id, verb, amount, keys, values] = request;
  const Status shape = wire::check_shape(request);
  if (!shape.ok()) return Error(ErrorCode::kInvalidArgument, shape.error().message());
  for (const std::string& key : keys) CADRE_RETURN_IF_ERROR(check_key(key));
  for (size_t i = 0; i < values.size(); ++i) {
    CADRE_RETURN_IF_ERROR(check_store_entry(keys[std::min(i, keys.size() - 1)], values[i]));
  }
  if (verb == StoreVerb::kBarrier && amount < 1) {
    return Error(
        ErrorCode::kInvalidArgument,
        format("store barrier \"{}\" of {} arrivals; expected at least 1", keys[0], amount));
  }
  if (verb != StoreVerb::kCancel && verb != StoreVerb::kLeaveWill &&
      verb != StoreVerb::kRetractWill) {
    return {};
  }
  return Error(ErrorCode::kInvalidArgument,
               format("store {} belongs to a connection, not to a store; use leave_will()",
                      wire::to_string(verb)));
}

Error store_timeout(std::string_view verb, std::span<const std::string> keys) {
  if (keys.empty()) {
    return Error(ErrorCode::kTimeout,
                 format("store {}: no answer from the store before the deadline", verb));
  }
  const std::string others =
      keys.size() > 1 ? format(" and {} more keys", keys.size() - 1) : std::string();
  return Error(ErrorCode::kTimeout,
               format("store {}: the deadline passed while waiting for key \"{}\"{}; the rank that "
                      "sets it is late or gone",
                      verb, keys.front(), others));
}

}  // namespace cadre
