// Runs through a pipeline schedule as its ranks would: where each action stands, what it needs, and
// in which order the actions of all ranks can run.
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: an index holds positions
// only. Errors: kInvalidArgument with rank, action and step for an action that does not fit the
// schedule, for one that needs what no rank runs, and for a schedule in which all ranks wait.
// Lowering, checker and simulator all go through a schedule by walk_pipeline().
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
  size_t step = 0;  // the index in the rank's list

  friend auto operator<=>(const PipelinePosition&, const PipelinePosition&) = default;
};

// "rank 1, step 5 (2F0)"; REQUIRES: a position in the schedule.
CADRE_EXPORT std::string describe(const PipelineSchedule& schedule,
                                  const PipelinePosition& position);

// Where each computation, send and receive stands.
class CADRE_EXPORT PipelineIndex {
 public:
  // Refuses an action of a stage that another rank holds, of a microbatch that does not exist, one
  // without the parts or the microbatch that its kind has, and one that stands twice.
  static Result<PipelineIndex> make(const PipelineSchedule& schedule);

  std::optional<PipelinePosition> find(PipelineActionKind kind, int stage, int microbatch) const;
  // Finds the B or, if there is none, the I.
  std::optional<PipelinePosition> find_backward(int stage, int microbatch) const;

  // What must have ended before `action`, one of the schedule, starts: for a computation its input,
  // which a receive brings in the lowered form, and the forward or I of the same microbatch; for a
  // send its computation; for a receive its send. UNSHARD, RESHARD and REDUCE_GRAD need nothing but
  // their place in the list.
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

// Calls `visit` for every action once, after all that it needs. In turns: each turn takes the ranks
// in their order, and of each its next action, if that has all it needs.
CADRE_EXPORT Status walk_pipeline(const PipelineSchedule& schedule, const PipelineIndex& index,
                                  const std::function<void(const PipelineVisit&)>& visit);

}  // namespace cadre
