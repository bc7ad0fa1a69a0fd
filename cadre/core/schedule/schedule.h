// A pipeline schedule as a value: what each rank does in one training step, in which order.
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: owns its actions.
// Errors: none here; check_pipeline() tells whether a schedule can be run.
// A schedule is in one of two forms. The compute-only form has F, B, I, W and OVERLAP_F_B; it is
// what the generators make. The lowered form has sends and receives too, and, where they are
// wanted, UNSHARD, RESHARD and REDUCE_GRAD; it is what an executor runs (lowering.h).
#pragma once

#include <cstddef>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/schedule/action.h"

namespace cadre {

struct PipelineSchedule {
  std::vector<std::vector<PipelineAction>> ranks;  // each rank's actions, in its order
  std::vector<int> rank_of_stage;                  // by stage of the model
  int num_microbatches = 0;

  int num_ranks() const { return static_cast<int>(ranks.size()); }
  int num_stages() const { return static_cast<int>(rank_of_stage.size()); }

  friend bool operator==(const PipelineSchedule&, const PipelineSchedule&) = default;
};

// Which rank holds which stage.
enum class StagePlacement {
  kLoop,  // 0 1 2 0 1 2: the stages go round the ranks
  kV,     // 0 1 2 2 1 0: every second pass goes back, so that the last rank holds two neighbours
};

struct PipelineShape {
  int num_ranks = 1;
  int stages_per_rank = 1;  // virtual stages
};

CADRE_EXPORT std::vector<int> place_stages(StagePlacement placement, const PipelineShape& shape);

// Whether it has sends or receives: the lowered form.
CADRE_EXPORT bool has_messages(const PipelineSchedule& schedule);

// The largest number of microbatches, counted on each of its stages, whose activations each rank
// keeps at one time: from the forward to the B or W that ends their use.
CADRE_EXPORT std::vector<int> peak_live_activations(const PipelineSchedule& schedule);

}  // namespace cadre
