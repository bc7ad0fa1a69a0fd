// Scales the loss, so that small gradients do not become zero in float16, and scales the gradients
// back. Adapts the scale to the largest value that keeps the gradients finite.
//
// Threads: one. Blocking: unscale_() of shards is a collective of the ranks that hold the
// parameters in parts; nothing else communicates. Lifetime: keeps nothing of the model. Errors:
// kInvalidArgument for options out of range, for calls in another order than scale(), backward(),
// unscale_(), step(), update(), for ranks with different scales (for shards, where ranks
// communicate), and for float16 gradients that float16 cannot hold without the scale. All ranks
// have the same scale, because they find the same gradients finite: gradients that are whole on
// every rank are equal there, and for shards the ranks agree. Source: torch.amp.GradScaler and
// torch.distributed.fsdp.sharded_grad_scaler.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(model);    // says whether every gradient is finite
//   scaler.step(optimizer);   // left out if an element is NaN or infinite
//   scaler.update();
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/model_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"

namespace cadre {

struct GradScalerOptions {
  double initial_scale = 65536.0;
  double growth_factor = 2.0;   // must be above 1
  double backoff_factor = 0.5;  // is in (0, 1), and is applied after a skipped step
  // The scale grows after this many consecutive steps that were done.
  int64_t growth_interval = 2000;
};

class CADRE_EXPORT GradScaler {
 public:
  // The state that a snapshot keeps.
  struct State {
    double scale = 0;
    int64_t num_good_steps = 0;  // the number of good steps since the scale last changed
    friend bool operator==(const State&, const State&) = default;
  };

  explicit GradScaler(const GradScalerOptions& options = {});

  // Returns the scaled loss; autograd records the product.
  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients by the scale, in place, and returns whether every element on every rank
  // is finite. A float16 gradient of which an element would become 0, or lose digits below 2^-14,
  // is an error on all ranks, and no gradient is changed: dividing it would undo the purpose of the
  // scale. Keep such parameters in float32, and compute in float16 with cadre::Autocast.
  // torch.amp.GradScaler refuses all float16 gradients, and ShardedGradScaler rounds them to 0.
  // Gradients: dense, floating point. parameters: each once, whole on each rank, with gradients
  // that DistributedDataParallel has reduced; shards of a wrapper are refused.
  // NOLINTBEGIN(readability-identifier-naming): torch's name for what works in place
  bool unscale_(std::span<const at::Tensor> parameters);
  bool unscale_(std::span<const ParameterShard> shards);
  // Takes any wrapper: uses its shards, or its parameters if their gradients are whole.
  template <HasGradients Model>
  bool unscale_(Model& model) {
    return shard::with_gradients_of(
        model, [this](std::span<const ParameterShard> shards) { return unscale_(shards); },
        [this](auto& whole) {
          const std::vector<at::Tensor> parameters = whole.parameters();
          return unscale_(std::span<const at::Tensor>(parameters));
        });
  }
  // NOLINTEND(readability-identifier-naming)

  // Calls optimizer.step() if unscale_() has found all gradients finite; returns whether it has
  // called it.
  template <typename Optimizer>
  bool step(Optimizer& optimizer) {
    if (!may_step()) return false;
    optimizer.step();
    return true;
  }

  // Computes a new scale. Called once after each step.
  void update();

  const State& state() const { return state_; }
  void load_state(const State& state);

 private:
  bool may_step() const;
  void check_order() const;

  GradScalerOptions options_;
  State state_;
  std::optional<bool> are_finite_;  // the result of unscale_() since the last update()
};

}  // namespace cadre
