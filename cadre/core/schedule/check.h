// Checks that a pipeline schedule can be run and computes one training step.
//
// Threads: pure functions. Blocking: never. Lifetime: values. Errors: kInvalidArgument; the message
// names rank, step and action, and what is expected. In both forms the check is that there is at
// least one rank, stage and microbatch, and every rank has actions; every microbatch has, on every
// stage, one F, and either one B or one I and one W; each is on the rank of its stage; all actions
// can run in the given order, so there is no deadlock, and no action comes before one that it
// needs. Checked in the lowered form also: each message between ranks is sent and received once,
// computations run on gathered parameters, and the gradients of a stage are reduced once, after the
// last of them.
#pragma once

#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

struct PipelineLimits {
  // The limit for peak_live_activations() of every rank; nullopt means no limit.
  std::optional<int> max_live_activations = {};
};

CADRE_EXPORT Status check_pipeline(const PipelineSchedule& schedule,
                                   const PipelineLimits& limits = {});

}  // namespace cadre
