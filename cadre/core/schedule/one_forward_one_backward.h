// The order of one rank in the schedules whose steady state is one forward and one backward: 1F1B,
// interleaved 1F1B, ZB-H1 and interleaved zero-bubble.
//
// Threads: pure functions. Blocking: never. Errors: none; REQUIRES what the members below say.
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
  // The number of microbatches that go through one stage of the rank before the rank continues with
  // its next stage. REQUIRES: a divisor of num_microbatches.
  int microbatches_per_turn = 1;
  // The number of forwards that each rank runs more than the next rank before its first backward,
  // in the warm-up. It is 1 if backwards follow each other as closely as forwards, and 2 if a rank
  // alternates between its stages.
  int warmup_per_hop = 1;
  // If backwards are split into I (gradient of the input) and W (gradients of the weights): the
  // number of further I that a rank runs between the I and the W of a microbatch. nullopt means
  // that backwards are not split.
  std::optional<int> weight_grad_delay = {};
};

std::vector<PipelineAction> one_forward_one_backward_order(const OneForwardOneBackward& pipeline);

}  // namespace cadre
