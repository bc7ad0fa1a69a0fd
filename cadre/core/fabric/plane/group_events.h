// The events that the control plane of a process delivers to its groups.
//
// Threads: GroupEvents is called by the plane's thread and, during ControlPlane::attach(), by the
// thread that calls it; never under a lock. Blocking: implementations must return quickly, because
// they delay the events of all groups. Lifetime: the plane shares ownership, so that detach() may
// run during a call. Errors: none.
// Rank numbers are those of the fabric, which are the ranks of the job, not those of a group.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/core/wire/control.h"

namespace cadre {

// Identifies a group in control messages: GroupIdentity::key(), which no other group has.
using GroupKey = uint64_t;
inline constexpr GroupKey kNoGroup = 0;

using SignOfLoss = wire::SignOfLoss;
using GroupActivity = wire::GroupActivity;
// The report that a rank is lost. The first report about a rank counts; later ones are ignored.
using LossReport = wire::LossReport;
// The first failure of a group, published by the member that found it.
using GroupFailure = wire::GroupFailure;

class GroupEvents {
 public:
  virtual ~GroupEvents() = default;
  // Called for each lost rank. If a peer has reported this rank as lost, loss.rank is this rank.
  virtual void on_rank_lost(const LossReport& loss) = 0;
  virtual void on_rank_left_group(const wire::GroupLeave& leave) = 0;
  // Called only for failures that other ranks have published.
  virtual void on_group_failed(const GroupFailure& failure) = 0;
  // Returns the reply to a status question, or nullopt to send no reply.
  virtual std::optional<wire::Activity> own_activity() = 0;
};

}  // namespace cadre
