#include "cadre/core/schedule/one_forward_one_backward.h"

#include <algorithm>

namespace cadre {
namespace {

// Computes the stage and the microbatch of a rank's n-th forward or backward.
//
// Forwards go in turns: the first microbatches go through the rank's first stage, then the same
// microbatches through its second stage, and so on; after the rank's last stage, the next
// microbatches follow. Backwards take the stages in the reverse order. So a microbatch that goes
// from the last rank to its next stage on the first rank arrives when that rank begins that stage.
class TurnOrder {
 public:
  explicit TurnOrder(const OneForwardOneBackward& pipeline) : pipeline_(pipeline) {}

  PipelineAction forward(int number) const {
    return at(number, PipelineActionKind::kForward, turn_of(number));
  }
  PipelineAction backward(int number, PipelineActionKind kind) const {
    return at(number, kind, pipeline_.stages_per_rank - 1 - turn_of(number));
  }

 private:
  int turn_of(int number) const {
    return number / pipeline_.microbatches_per_turn % pipeline_.stages_per_rank;
  }
  PipelineAction at(int number, PipelineActionKind kind, int local_stage) const {
    const int per_round = pipeline_.microbatches_per_turn * pipeline_.stages_per_rank;
    const int microbatch = number / per_round * pipeline_.microbatches_per_turn +
                           number % pipeline_.microbatches_per_turn;
    return {.kind = kind,
            .stage = local_stage * pipeline_.num_ranks + pipeline_.rank,
            .microbatch = microbatch};
  }

  const OneForwardOneBackward& pipeline_;
};

}  // namespace

std::vector<PipelineAction> one_forward_one_backward_order(const OneForwardOneBackward& pipeline) {
  const TurnOrder order(pipeline);
  const int total = pipeline.num_microbatches * pipeline.stages_per_rank;
  const int num_following_ranks = pipeline.num_ranks - 1 - pipeline.rank;
  const int warmup = (pipeline.stages_per_rank - 1) * pipeline.microbatches_per_turn +
                     pipeline.warmup_per_hop * num_following_ranks;
  std::vector<PipelineAction> actions;
  int num_forwards = 0;
  while (num_forwards < std::min(warmup, total)) actions.push_back(order.forward(num_forwards++));
  int num_weight_grads = 0;
  const auto add_weight_grad = [&] {
    actions.push_back(order.backward(num_weight_grads++, PipelineActionKind::kWeightGrad));
  };
  const PipelineActionKind backward_kind =
      pipeline.weight_grad_delay ? PipelineActionKind::kInputGrad : PipelineActionKind::kBackward;
  for (int i = 0; i < total; ++i) {
    if (num_forwards < total) actions.push_back(order.forward(num_forwards++));
    actions.push_back(order.backward(i, backward_kind));
    if (pipeline.weight_grad_delay && i >= *pipeline.weight_grad_delay) add_weight_grad();
  }
  while (pipeline.weight_grad_delay && num_weight_grads < total) add_weight_grad();
  return actions;
}

}  // namespace cadre
