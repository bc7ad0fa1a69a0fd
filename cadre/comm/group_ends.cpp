#include "cadre/comm/group_ends.h"

#include <algorithm>

namespace cadre {

GroupEnds::GroupEnds(int world_size, Rank self)
    : self_(static_cast<size_t>(self.value)), ends_(static_cast<size_t>(world_size)) {}

void GroupEnds::note_left(const Call& last) {
  ends_[static_cast<size_t>(last.rank)].last = last;
}

void GroupEnds::note_gone(int rank) {
  ends_[static_cast<size_t>(rank)].is_gone = true;
}

bool GroupEnds::is_open() const {
  return ends_[self_].last &&
         std::ranges::any_of(ends_, [](const End& end) { return !end.last && !end.is_gone; });
}

std::optional<Mismatch> GroupEnds::take_mismatch() {
  const std::optional<Call>& own = ends_[self_].last;
  if (!own || is_told_) return std::nullopt;
  for (const End& end : ends_) {
    if (!end.last) continue;
    if (end.last->number == own->number && end.last->fingerprint == own->fingerprint) continue;
    is_told_ = true;
    return Mismatch{*own, *end.last};
  }
  return std::nullopt;
}

}  // namespace cadre
