#include "cadre/comm/failure/failure_links.h"

#include <algorithm>
#include <utility>

#include "cadre/comm/failure/monitor.h"

namespace cadre {

Failure failure_of_linked_group(const FirstFailure& first, const Roster& theirs,
                                const Roster& here) {
  // Groups of different jobs have no common ranks.
  const bool is_one_job = theirs.layout == here.layout;
  const auto rank_here = [&](int rank) {
    if (rank < 0 || !is_one_job) return -1;
    const auto found = std::ranges::find(here.members, theirs.members[static_cast<size_t>(rank)]);
    return found == here.members.end() ? -1 : static_cast<int>(found - here.members.begin());
  };
  const bool are_all_theirs =
      is_one_job && std::ranges::all_of(here.members, [&](int member) {
        return std::ranges::find(theirs.members, member) != theirs.members.end();
      });
  const int reporter = first.failure.reporter < 0 ? theirs.self.value : first.failure.reporter;
  Failure failure;
  failure.culprit = rank_here(first.failure.culprit);
  failure.reporter = rank_here(reporter);
  const bool is_loss_here = first.is_loss && failure.culprit >= 0;
  failure.code = is_loss_here ? ErrorCode::kPeerLost : ErrorCode::kAborted;
  failure.cause = first_failure_cause(first.failure.cause, first.sentence);
  failure.is_logged = false;
  failure.is_published = !are_all_theirs;
  return failure;
}

std::optional<FirstFailure> FailureLinks::add(std::weak_ptr<Monitor> group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
  return spread_;
}

void FailureLinks::spread(const FirstFailure& first, const Roster& self) {
  std::vector<std::weak_ptr<Monitor>> groups;
  {
    const std::lock_guard lock(mutex_);
    spread_ = first;
    groups = groups_;
  }
  for (const std::weak_ptr<Monitor>& group : groups) {
    if (const std::shared_ptr<Monitor> alive = group.lock()) alive->fail_with(first, self);
  }
}

}  // namespace cadre
