// The order of one rank in the schedules for V placement: ZB-V and DualPipeV.
//
// Threads: pure functions. Blocking: never. Errors: none; REQUIRES what the functions below say.
// Source: arXiv 2401.10241, section 6 (ZB-V); 2412.19437, section 3.2.1, and its authors'
// description of the form in which each rank has two stages (DualPipeV).
#pragma once

#include <vector>

#include "cadre/core/schedule/action.h"

namespace cadre {

// The model has 2 * num_ranks stages. Rank r has stage r, on the way down, and stage 2 * num_ranks
// - 1 - r, on the way back.
struct VPipeline {
  int rank = 0;
  int num_ranks = 1;
  int num_microbatches = 1;
};

std::vector<PipelineAction> zb_v_order(const VPipeline& pipeline);

// Returns the actions of one rank in DualPipeV. REQUIRES: at least as many microbatches as stages.
std::vector<PipelineAction> dualpipe_v_order(const VPipeline& pipeline);

}  // namespace cadre
