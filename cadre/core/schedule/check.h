// Checks that a pipeline schedule can be run and computes one training step.
//
// Threads: pure functions. Blocking: never. Lifetime: values. Errors: kInvalidArgument; the message
// names rank, step and action, and what is expected. A schedule passes if it has at least one rank,
// stage and microbatch, every rank has actions, and every microbatch has on every stage one F, and
// either one B or one I and one W, each on the rank of its stage. All actions must be able to run
// in the given order: no action comes before one that it needs, so there is no deadlock. In the
// lowered form (lowering.h) also each message between ranks must be sent and received once,
// computations must run on gathered parameters, and the gradients of a stage must be reduced once,
// after the last of them.
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
