#include "cadre/rendezvous/named_culprit.h"

#include <charconv>
#include <string>
#include <vector>

#include "cadre/base/format.h"

namespace cadre {
namespace {

std::string key_of(Rank writer) {
  return format("cadre/failure/{}", writer);
}

}  // namespace

Status name_culprit(Store& store, const NamedCulprit& named, Deadline deadline) {
  return store.set(key_of(named.writer), format("{}", named.culprit), deadline);
}

Result<std::optional<Rank>> read_culprit(Store& store, Rank writer, Deadline deadline) {
  const std::vector<std::string> keys = {key_of(writer)};
  const Result<bool> is_there = store.check(keys, deadline);
  if (!is_there.ok()) return is_there.error();
  if (!*is_there) return std::optional<Rank>();
  const Result<std::string> text = store.get(keys.front(), deadline);
  if (!text.ok()) return text.error();
  int culprit = -1;
  const char* const end = text->data() + text->size();
  const auto [parsed, code] = std::from_chars(text->data(), end, culprit);
  if (code == std::errc() && parsed == end && culprit >= 0) return std::optional(Rank(culprit));
  return Error(ErrorCode::kCorruption, format("store key \"{}\" holds \"{}\", which is no rank",
                                              keys.front(), text->substr(0, 64)));
}

Status forget_culprit(Store& store, Rank writer, Deadline deadline) {
  const Result<bool> erased = store.erase(key_of(writer), deadline);
  return erased.ok() ? Status() : Status(erased.error());
}

}  // namespace cadre
