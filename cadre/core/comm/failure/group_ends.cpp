#include "cadre/core/comm/failure/group_ends.h"

#include <utility>

namespace cadre {

GroupEnds::GroupEnds(int world_size, Rank self)
    : self_(static_cast<size_t>(self.value)), last_(static_cast<size_t>(world_size)) {}

void GroupEnds::note_left(const Call& last) {
  std::optional<Call>& known = last_[static_cast<size_t>(last.rank)];
  if (!known) ++num_left_;
  known = last;
  if (last.rank != static_cast<int>(self_)) return compare(last);
  for (const auto& other : last_) {
    if (other) compare(*other);
  }
}

void GroupEnds::compare(const Call& other) {
  const std::optional<Call>& own = last_[self_];
  if (!own || mismatch_) return;
  if (other.number == own->number && other.fingerprint == own->fingerprint) return;
  mismatch_ = Mismatch{*own, other};
}

bool GroupEnds::is_open() const {
  return last_[self_] && !has_failed_ && num_left_ < last_.size();
}

std::optional<Mismatch> GroupEnds::take_mismatch() {
  if (!mismatch_ || std::exchange(is_taken_, true)) return std::nullopt;
  return mismatch_;
}

}  // namespace cadre
