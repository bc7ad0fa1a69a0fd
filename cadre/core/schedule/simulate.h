// When each action of a pipeline schedule runs, given what computations and messages take: the
// length of a step, the idle share of each rank and its peak of live activations.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument for times that are no times or not those of the stages, and for what
// walk_pipeline() refuses.
// The model: a rank runs its actions one after the other, each as soon as it has what it needs. A
// message is there message_ms after its send, whatever else is on the way; sends take no time of
// the sender, a receive lasts until its message is there, and UNSHARD, RESHARD and REDUCE_GRAD take
// none.
#pragma once

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

// Milliseconds that one microbatch takes on one stage.
struct StageCosts {
  double forward_ms = 1;
  double backward_ms = 2;
  double input_grad_ms = 1;
  double weight_grad_ms = 1;
};

struct PipelineCosts {
  std::vector<StageCosts> stages = {StageCosts{}};  // by stage, or one for all
  double message_ms = 0;                            // between any two ranks
  // The share of the shorter part of an OVERLAP_F_B that runs beside the longer one: 0 to 1.
  double overlap_share = 0;
};

struct TimedAction {
  PipelineAction action;
  double begin_ms = 0;
  double end_ms = 0;
};

struct PipelineTimeline {
  std::vector<std::vector<TimedAction>> ranks;
  double makespan_ms = 0;
  std::vector<double> busy_ms;             // in computations, of each rank
  std::vector<int> peak_live_activations;  // by rank

  // The share of the step in which the rank does not compute.
  double bubble_share(int rank) const {
    return makespan_ms > 0 ? 1 - busy_ms[rank] / makespan_ms : 0;
  }
};

CADRE_EXPORT Result<PipelineTimeline> simulate_pipeline(const PipelineSchedule& schedule,
                                                        const PipelineCosts& costs);

}  // namespace cadre
