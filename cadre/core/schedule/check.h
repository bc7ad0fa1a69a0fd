// Checks that a pipeline schedule can be run and computes one training step.
//
// Threads: pure functions. Blocking: never. Lifetime: values.
// Errors: kInvalidArgument; the sentence names rank, step and action, and what is expected.
// Checked, in both forms: there are at least one rank, stage and microbatch, and every rank has
// actions; every microbatch has one F, and one B or one I and one W, on every stage;
// each stands on the rank of its stage; all of them can run in the given order, so there is no
// deadlock, and nothing comes before what it needs. In the lowered form also: each message between
// ranks is sent and received once, computations run on gathered parameters, and gradients are
// reduced once, after the last of them.
#pragma once

#include <optional>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/schedule/schedule.h"

namespace cadre {

struct PipelineLimits {
  // Limit for peak_live_activations() of every rank; nullopt: none.
  std::optional<int> max_live_activations = {};
};

CADRE_EXPORT Status check_pipeline(const PipelineSchedule& schedule,
                                   const PipelineLimits& limits = {});

}  // namespace cadre
