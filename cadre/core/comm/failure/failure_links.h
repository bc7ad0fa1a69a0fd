// The groups of this process that fail together with a group, and the translation of a failure of
// one group into a failure of another.
//
// Threads: any. Blocking: spread(), while the linked groups publish the failure; it holds no lock
// meanwhile. Lifetime: keeps no linked group alive. Errors: none.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/comm/failure/diagnosis.h"

namespace cadre {

class Monitor;

// The information about a group's failure that its linked groups need.
struct FirstFailure {
  Failure failure;
  std::string sentence;
};

// Returns the failure of the group `here` after its linked group `theirs` has failed. The loss of a
// member of `here` is raised as kPeerLost, also if the lost rank is no member of `theirs`; any
// other failure as kAborted. In both cases the message contains the sentence of the first failure.
// The reporter is -1 if it is no member of `here`.
Failure failure_of_linked_group(const FirstFailure& first, const Roster& theirs,
                                const Roster& here);

// The groups that a thread has already failed because of one failure, so that it visits no group
// twice.
using VisitedGroups = std::vector<const Monitor*>;

class FailureLinks {
 public:
  // Adds a group. Returns the failure that this group has already spread to its linked groups and
  // with which the new group must fail; nullopt if there is none.
  std::optional<FirstFailure> add(const std::shared_ptr<Monitor>& group);
  // Fails all linked groups, and those that are added later, with the first failure of `self`,
  // except those that this thread has `visited`. Each thread visits all linked groups, even if
  // another thread has begun to, because the waits of its own group may end only when the other
  // groups have failed.
  void spread(const FirstFailure& first, const Roster& self, VisitedGroups& visited);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Monitor>> groups_;
  std::optional<FirstFailure> spread_;
};

}  // namespace cadre
