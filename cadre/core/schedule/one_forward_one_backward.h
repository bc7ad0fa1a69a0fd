// The order of one rank in the schedules whose steady state is one forward and one backward: 1F1B,
// interleaved 1F1B, ZB-H1 and interleaved zero-bubble.
//
// Threads: pure functions. Blocking: never. Errors: none; REQUIRES what is said below.
// Source: arXiv 2104.04473 (warm-up and order of chunks), 2401.10241 (delay of weight gradients).
#pragma once

#include <optional>
#include <vector>

#include "cadre/core/schedule/action.h"

namespace cadre {

struct OneForwardOneBackward {
  int rank = 0;
  int num_ranks = 1;
  int stages_per_rank = 1;
  int num_microbatches = 1;
  // Microbatches that go through one stage of the rank before it turns to its next stage.
  // REQUIRES: a divisor of num_microbatches.
  int microbatches_per_turn = 1;
  // Forwards before the first backward, more for each rank that follows: 1 when backwards follow
  // each other as densely as forwards; 2 when a rank alternates between its stages meanwhile.
  int warmup_per_hop = 1;
  // Backwards are split, and the W of one comes this many I later; absent: they are not split.
  std::optional<int> weight_grad_delay = {};
};

std::vector<PipelineAction> one_forward_one_backward_order(const OneForwardOneBackward& pipeline);

}  // namespace cadre
