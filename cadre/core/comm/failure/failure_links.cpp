#include "cadre/core/comm/failure/failure_links.h"

#include <algorithm>
#include <utility>

#include "cadre/core/comm/failure/monitor.h"

namespace cadre {

Failure failure_of_linked_group(const FirstFailure& first, const Roster& theirs,
                                const Roster& here) {
  // Groups of different jobs have no common ranks, so their ranks are not compared.
  const bool is_one_job = theirs.layout == here.layout;
  const auto of_fabric = [&](int rank) {
    return rank < 0 ? -1 : theirs.members[static_cast<size_t>(rank)];
  };
  const auto rank_here = [&](int of_job) {
    const auto found = std::ranges::find(here.members, of_job);
    return of_job < 0 || !is_one_job || found == here.members.end()
               ? -1
               : static_cast<int>(found - here.members.begin());
  };
  const int culprit =
      first.failure.culprit < 0 ? first.failure.outside_culprit : of_fabric(first.failure.culprit);
  const int reporter = first.failure.reporter < 0 ? theirs.self.value : first.failure.reporter;
  Failure failure;
  failure.culprit = rank_here(culprit);
  failure.outside_culprit = is_one_job && failure.culprit < 0 ? culprit : -1;
  failure.is_loss = first.failure.is_loss && is_one_job;
  failure.reporter = rank_here(of_fabric(reporter));
  const bool is_loss_here = failure.is_loss && failure.culprit >= 0;
  failure.code = is_loss_here ? ErrorCode::kPeerLost : ErrorCode::kAborted;
  failure.cause = first_failure_cause(first.failure.cause, first.sentence);
  failure.is_logged = false;
  failure.is_linked = true;
  return failure;
}

std::optional<FirstFailure> FailureLinks::add(const std::shared_ptr<Monitor>& group) {
  const std::lock_guard lock(mutex_);
  // Removes groups that were destroyed, and an earlier link to the same group.
  std::erase_if(groups_, [&](const std::weak_ptr<Monitor>& known) {
    const std::shared_ptr<Monitor> alive = known.lock();
    return alive == nullptr || alive == group;
  });
  groups_.push_back(group);
  return spread_;
}

void FailureLinks::spread(const FirstFailure& first, const Roster& self, VisitedGroups& visited) {
  std::vector<std::weak_ptr<Monitor>> groups;
  {
    const std::lock_guard lock(mutex_);
    if (!spread_) spread_ = first;
    groups = groups_;
  }
  for (const std::weak_ptr<Monitor>& group : groups) {
    if (const std::shared_ptr<Monitor> alive = group.lock()) alive->fail_with(first, self, visited);
  }
}

std::optional<FirstFailure> Monitor::first_failure(const Failure& failure,
                                                   std::string sentence) const {
  const std::lock_guard lock(mutex_);
  if (is_stopped_) return std::nullopt;
  return FirstFailure{failure, std::move(sentence)};
}

void Monitor::fail_with(const FirstFailure& first, const Roster& theirs, VisitedGroups& visited) {
  if (std::ranges::find(visited, this) != visited.end()) return;
  const Failure failure = failure_of_linked_group(first, theirs, roster());
  const TimePoint now = system_.now();
  bool has_claimed = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure.code == ErrorCode::kPeerLost) {
      // The rank is marked as lost here, because the control plane may report its loss too late,
      // after rejoin() has read the list of lost ranks.
      Peer& lost = peers_[static_cast<size_t>(failure.culprit)];
      lost.is_gone = lost.is_gone || !lost.left_after;
    }
    if (!is_leaving_) has_claimed = arbiter_.report(failure, now);
    wake_observers();
  }
  if (has_claimed) return publish(failure, visited);
  visited.push_back(this);
  links_.spread({failure, first.sentence}, roster(), visited);
}

void Monitor::link(const std::shared_ptr<Monitor>& one, const std::shared_ptr<Monitor>& other) {
  if (one == other) return;
  VisitedGroups visited;
  if (const auto earlier = one->links_.add(other)) {
    other->fail_with(*earlier, one->roster(), visited);
  }
  if (const auto earlier = other->links_.add(one)) {
    one->fail_with(*earlier, other->roster(), visited);
  }
}

}  // namespace cadre
