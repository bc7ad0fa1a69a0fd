// What the control plane of a process tells its groups, and what they tell it.
//
// Threads: GroupEvents is called by the plane's thread, and by the thread that calls
// ControlPlane::attach() while it does; never under a lock. Blocking: implementations return soon;
// the news of all groups waits for them. Lifetime: shared, so that a call under way outlives
// detach(). Errors: none.
// All ranks here are those of the fabric, which are the job's, not those of a group.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/wire/control.h"

namespace cadre {

// Names a group in control messages; unique in the job and round, never used again.
using GroupKey = uint64_t;

using SignOfLoss = wire::SignOfLoss;
using GroupActivity = wire::GroupActivity;
// The first report that arrives here is the one that counts.
using LossReport = wire::LossReport;
// The first failure of a group, told by the member that found it.
using GroupFailure = wire::GroupFailure;

class GroupEvents {
 public:
  virtual ~GroupEvents() = default;
  // Also with loss.rank == this rank, when another one takes this one for lost.
  virtual void on_rank_lost(const LossReport& loss) = 0;
  virtual void on_rank_left_group(const wire::GroupLeave& leave) = 0;
  // Of failures of other ranks only.
  virtual void on_group_failed(const GroupFailure& failure) = 0;
  // The answer to a status question; nullopt for none.
  virtual std::optional<wire::Activity> own_activity() = 0;
};

}  // namespace cadre
