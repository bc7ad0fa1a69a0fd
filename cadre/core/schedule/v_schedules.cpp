#include "cadre/core/schedule/v_schedules.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>

namespace cadre {
namespace {

enum Leg : size_t { kDown, kBack };  // one of the rank's two stages

// Appends actions of a rank's two stages. Each action takes the next microbatch of its stage and
// kind.
class VOrder {
 public:
  explicit VOrder(const VPipeline& pipeline)
      : stages_{pipeline.rank, 2 * pipeline.num_ranks - 1 - pipeline.rank},
        num_microbatches_(pipeline.num_microbatches) {}

  int num_forwards(Leg leg) const { return num_forwards_[leg]; }

  void forward(Leg leg) { add(next_forward(leg)); }
  void full_backward(Leg leg) { add(next_backward(leg, PipelineActionKind::kBackward)); }
  void input_grad(Leg leg) {
    add(next_backward(leg, PipelineActionKind::kInputGrad));
    without_weight_grad_.emplace_back(leg, num_backwards_[leg] - 1);
  }
  void backward(Leg leg, PipelineActionKind kind) {
    kind == PipelineActionKind::kInputGrad ? input_grad(leg) : full_backward(leg);
  }
  void overlap(Leg forward_leg, Leg backward_leg) {
    PipelineAction forward = next_forward(forward_leg);
    PipelineAction backward = next_backward(backward_leg, PipelineActionKind::kBackward);
    actions_.push_back(
        {.kind = PipelineActionKind::kOverlap, .parts = {std::move(forward), std::move(backward)}});
  }
  // Appends the W of the oldest I of this stage that has no W yet, if there is one.
  // oldest_weight_grad() considers both stages.
  void weight_grad(Leg leg) {
    take_weight_grad(std::ranges::find(without_weight_grad_, leg, &std::pair<Leg, int>::first));
  }
  void oldest_weight_grad() { take_weight_grad(without_weight_grad_.begin()); }

  std::vector<PipelineAction> take() && { return std::move(actions_); }

 private:
  // ZB-V's phases are written for at least 2p - 1 microbatches on p ranks. If there are fewer, the
  // actions for microbatches that do not exist are dropped.
  void add(PipelineAction action) {
    if (*action.microbatch < num_microbatches_) actions_.push_back(std::move(action));
  }
  PipelineAction next_forward(Leg leg) {
    return {.kind = PipelineActionKind::kForward,
            .stage = stages_[leg],
            .microbatch = num_forwards_[leg]++};
  }
  PipelineAction next_backward(Leg leg, PipelineActionKind kind) {
    return {.kind = kind, .stage = stages_[leg], .microbatch = num_backwards_[leg]++};
  }
  void take_weight_grad(std::deque<std::pair<Leg, int>>::iterator found) {
    if (found == without_weight_grad_.end()) return;
    add({.kind = PipelineActionKind::kWeightGrad,
         .stage = stages_[found->first],
         .microbatch = found->second});
    without_weight_grad_.erase(found);
  }

  std::array<int, 2> stages_;
  int num_microbatches_;
  std::array<int, 2> num_forwards_{};
  std::array<int, 2> num_backwards_{};
  std::deque<std::pair<Leg, int>> without_weight_grad_;  // the microbatches in the order of their I
  std::vector<PipelineAction> actions_;
};

// Calls `body` `times` times.
template <typename Body>
void repeat(int times, Body body) {
  for (int i = 0; i < times; ++i) body(i);
}

}  // namespace

// If F, I and W take equally long, no rank idles between its first and its last action: the first
// rank fills the time until its first backward with 2p - 1 forwards, and in the steady state each
// rank runs F, I and W of both stages in turn. At the end the remaining W, for which no rank waits,
// fill the gaps between I.
std::vector<PipelineAction> zb_v_order(const VPipeline& pipeline) {
  const int rank = pipeline.rank;
  const int to_last = pipeline.num_ranks - rank;
  const int num_microbatches = std::max(pipeline.num_microbatches, 2 * pipeline.num_ranks - 1);
  VOrder order(pipeline);
  const auto split_backward = [&order](Leg leg) {
    order.input_grad(leg);
    order.weight_grad(leg);
  };
  repeat(2 * to_last - 1, [&](int) { order.forward(kDown); });
  repeat(rank, [&](int) {
    order.forward(kBack);
    order.forward(kDown);
  });
  repeat(to_last, [&](int) {
    order.forward(kBack);
    split_backward(kBack);
  });
  while (order.num_forwards(kBack) < num_microbatches) {
    if (order.num_forwards(kDown) < num_microbatches) order.forward(kDown);
    split_backward(kDown);
    order.forward(kBack);
    split_backward(kBack);
  }
  repeat(rank, [&](int) {
    order.input_grad(kDown);
    order.input_grad(kBack);
  });
  repeat(to_last, [&](int) {
    order.input_grad(kDown);
    order.weight_grad(kDown);
  });
  repeat(rank, [&](int) { order.weight_grad(kBack); });
  repeat(rank, [&](int) { order.weight_grad(kDown); });
  return std::move(order).take();
}

// The steady state overlaps a forward of one stage with a backward of the other, so that each one's
// communication runs at the same time as the other's computation. Backwards are split where a rank
// would otherwise wait for a gradient: before the steady state, and in the second half of the
// actions after it.
std::vector<PipelineAction> dualpipe_v_order(const VPipeline& pipeline) {
  const int rank = pipeline.rank;
  const int num_following = pipeline.num_ranks - 1 - rank;
  VOrder order(pipeline);
  repeat(2 * num_following, [&](int) { order.forward(kDown); });
  repeat(rank + 1, [&](int) {
    order.forward(kDown);
    order.forward(kBack);
  });
  repeat(num_following, [&](int) {
    order.input_grad(kBack);
    order.oldest_weight_grad();
    order.forward(kBack);
  });
  repeat(pipeline.num_microbatches - 2 * pipeline.num_ranks + rank + 1, [&](int i) {
    if (i == 0 && num_following == 0) {
      order.forward(kDown);  // the last rank needs its own output at once
      order.full_backward(kBack);
    } else {
      order.overlap(kDown, kBack);
    }
    order.overlap(kBack, kDown);
  });
  repeat(num_following, [&](int) {
    order.full_backward(kBack);
    order.overlap(kBack, kDown);
  });
  // The next 2 (rank + 1) backwards: the first half of them are whole (B), and the second half are
  // split (I, with a later W).
  const auto kind_of = [rank](int number) {
    return number > rank ? PipelineActionKind::kInputGrad : PipelineActionKind::kBackward;
  };
  repeat(rank + 1, [&](int i) {
    order.backward(kBack, kind_of(2 * i));
    order.backward(kDown, kind_of(2 * i + 1));
  });
  repeat(num_following, [&](int) {
    order.oldest_weight_grad();
    order.input_grad(kDown);
  });
  repeat(rank + 1, [&](int) { order.oldest_weight_grad(); });
  return std::move(order).take();
}

}  // namespace cadre
