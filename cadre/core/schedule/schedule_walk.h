// Walks through a pipeline schedule as its ranks would: finds the position of each action, the
// actions that it needs, and an order in which the actions of all ranks can run.
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: an index holds positions
// only. Errors: kInvalidArgument with rank, action and step for an action that does not fit the
// schedule, for one that needs an action that no rank has, and for a schedule in which all ranks
// wait. Lowering, checker and simulator all go through a schedule with walk_pipeline().
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

struct PipelinePosition {
  int rank = 0;
  size_t step = 0;  // the index of the action in the list of the rank

  friend auto operator<=>(const PipelinePosition&, const PipelinePosition&) = default;
};

// Returns "rank 1, step 5 (2F0)". REQUIRES: `position` is in the schedule.
CADRE_EXPORT std::string describe(const PipelineSchedule& schedule,
                                  const PipelinePosition& position);

// The index of a schedule: the position of each computation, send and receive.
class CADRE_EXPORT PipelineIndex {
 public:
  // Returns an error for an action of a stage that another rank has, or of a microbatch that does
  // not exist, for an action without the parts or the microbatch that its kind requires, and for
  // one that occurs twice.
  static Result<PipelineIndex> make(const PipelineSchedule& schedule);

  std::optional<PipelinePosition> find(PipelineActionKind kind, int stage, int microbatch) const;
  // Finds the B of this stage and microbatch or, if there is none, the I.
  std::optional<PipelinePosition> find_backward(int stage, int microbatch) const;

  // Returns the actions that must have ended before `action` of the schedule starts. A computation
  // needs its input, which in the lowered form a receive brings, and the forward or I of the same
  // microbatch; a send needs its computation; a receive needs its send. UNSHARD, RESHARD and
  // REDUCE_GRAD need only the actions before them in the list.
  Result<std::vector<PipelinePosition>> needs_of(const PipelineSchedule& schedule,
                                                 const PipelineAction& action) const;

 private:
  Status needs_of_leaf(const PipelineSchedule& schedule, const PipelineAction& leaf,
                       std::vector<PipelinePosition>& needs) const;

  std::unordered_map<uint64_t, PipelinePosition> positions_;
  bool has_messages_ = false;
};

struct PipelineVisit {
  PipelinePosition position;
  const PipelineAction& action;
  std::span<const PipelinePosition> needs;
};

// Calls `visit` once for every action, after all actions that it needs. Works in turns: in each
// turn every rank, in rank order, runs its next action if all actions that it needs have run.
CADRE_EXPORT Status walk_pipeline(const PipelineSchedule& schedule, const PipelineIndex& index,
                                  const std::function<void(const PipelineVisit&)>& visit);

}  // namespace cadre
