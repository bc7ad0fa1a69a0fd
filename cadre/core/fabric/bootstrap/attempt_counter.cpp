#include "cadre/core/fabric/bootstrap/attempt_counter.h"

#include <charconv>
#include <span>

#include "cadre/core/base/format.h"

namespace cadre {

AttemptCounter::AttemptCounter(Store& store, const std::string& group_prefix)
    : store_(store), key_(group_prefix + "attempt") {}

Result<uint64_t> AttemptCounter::read(Deadline deadline) const {
  const auto is_there = store_.check(std::span(&key_, 1), deadline);
  if (!is_there.ok()) return is_there.error();
  if (!*is_there) return uint64_t{0};
  const auto text = store_.get(key_, deadline);
  if (!text.ok()) return text.error();
  uint64_t number = 0;
  const char* const end = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    return Error(ErrorCode::kCorruption,
                 format("store key \"{}\" holds \"{}\", which is no number", key_, *text));
  }
  return number;
}

void AttemptCounter::leave(uint64_t failed, Deadline deadline) const {
  (void)store_.compare_set(key_, failed == 0 ? "" : std::to_string(failed),
                           std::to_string(failed + 1), deadline);
}

}  // namespace cadre
