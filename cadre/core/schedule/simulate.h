// Simulates when each action of a pipeline schedule runs, for given times of computations and
// messages: the length of a step, the idle share of each rank and its peak of live activations.
//
// Threads: pure functions. Blocking: never. Lifetime: values. Errors: kInvalidArgument for invalid
// times, for a number of times other than the number of stages, and for schedules for which
// walk_pipeline() returns an error. The model: a rank runs its actions one after the other, each as
// soon as the actions that it needs have ended. A message arrives message_ms after its send,
// whatever else is being sent. A send takes none of the sender's time, a receive lasts until its
// message has arrived, and UNSHARD, RESHARD and REDUCE_GRAD take no time.
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
  // Has one entry for each stage, or one entry that all stages share.
  std::vector<StageCosts> stages = {StageCosts{}};
  double message_ms = 0;  // the time that a message takes between any two ranks
  // The share of the shorter part of an OVERLAP_F_B that runs at the same time as the longer part,
  // from 0 to 1.
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
  std::vector<double> busy_ms;             // busy_ms[r] is the time that rank r computes
  std::vector<int> peak_live_activations;  // peak_live_activations[r] is the peak of rank r

  // Returns the share of the step in which the rank does not compute.
  double bubble_share(int rank) const {
    return makespan_ms > 0 ? 1 - busy_ms[rank] / makespan_ms : 0;
  }
};

CADRE_EXPORT Result<PipelineTimeline> simulate_pipeline(const PipelineSchedule& schedule,
                                                        const PipelineCosts& costs);

}  // namespace cadre
