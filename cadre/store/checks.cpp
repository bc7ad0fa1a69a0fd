#include "cadre/store/checks.h"

#include "cadre/base/format.h"
#include "cadre/store/store.h"

namespace cadre {

Status check_store_key(std::string_view key) {
  if (key.size() <= kMaxStoreKeyBytes) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("store key of {} bytes, which begins \"{}\", is over the limit of {} bytes; "
                      "use a shorter key",
                      key.size(), key.substr(0, 64), kMaxStoreKeyBytes));
}

Status check_store_keys(std::span<const std::string> keys) {
  for (const std::string& key : keys) CADRE_RETURN_IF_ERROR(check_store_key(key));
  return {};
}

Status check_store_entry(std::string_view key, std::string_view value) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  if (value.size() <= kMaxStoreValueBytes) return {};
  return Error(ErrorCode::kInvalidArgument,
               format("value of {} bytes for store key \"{}\" is over the limit of {} bytes; the "
                      "store is for addresses and small facts, send data through a group",
                      value.size(), key, kMaxStoreValueBytes));
}

Status check_store_entries(std::span<const std::string> keys, std::span<const std::string> values) {
  if (keys.size() != values.size()) {
    return Error(ErrorCode::kInvalidArgument,
                 format("multi_set got {} keys and {} values; give one value for each key",
                        keys.size(), values.size()));
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    CADRE_RETURN_IF_ERROR(check_store_entry(keys[i], values[i]));
  }
  return {};
}

Status check_store_barrier(std::string_view key, int64_t num_arrivals) {
  CADRE_RETURN_IF_ERROR(check_store_key(key));
  if (num_arrivals >= 1) return {};
  return Error(
      ErrorCode::kInvalidArgument,
      format("store barrier \"{}\" of {} arrivals; expected at least 1", key, num_arrivals));
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
