// A pipeline schedule as a value: the actions of each rank in one training step, in their order.
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: owns its actions.
// Errors: none here; check_pipeline() checks whether a schedule can be run. A schedule has one of
// two forms. The compute-only form has F, B, I, W and OVERLAP_F_B; the generators make it. The
// lowered form also has sends and receives, and, if wanted, UNSHARD, RESHARD and REDUCE_GRAD; an
// executor runs it (lowering.h).
#pragma once

#include <cstddef>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/schedule/action.h"

namespace cadre {

struct PipelineSchedule {
  // The list ranks[r] has the actions of rank r in the order in which it runs them.
  std::vector<std::vector<PipelineAction>> ranks;
  std::vector<int> rank_of_stage;  // rank_of_stage[s] is the rank that holds stage s of the model
  int num_microbatches = 0;

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }

  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

// The assignment of stages to ranks.
enum class StagePlacement {
  kLoop,  // 0 1 2 0 1 2: the stages go around the ranks
  // The stages of the ranks are 0 1 2 2 1 0: every second pass goes back, so that the last rank has
  // two neighbouring stages.
  kV,
};

struct PipelineShape {
  int num_ranks = 1;
  int stages_per_rank = 1;  // the number of virtual stages of each rank
};

CADRE_EXPORT std::vector<int> place_stages(StagePlacement placement, const PipelineShape& shape);

// Returns whether the schedule has sends or receives, that is, the lowered form.
CADRE_EXPORT bool has_messages(const PipelineSchedule& schedule);

// Returns for each rank the largest number of activations that it keeps at one time, counted by
// microbatch and stage: from the forward to the B or W that ends their use.
CADRE_EXPORT std::vector<int> peak_live_activations(const PipelineSchedule& schedule);

}  // namespace cadre
