// Scales the loss, so that small gradients do not become zero in float16, and divides the gradients
// by the scale afterwards. Adapts the scale to the largest value with which the gradients stay
// finite.
//
// Blocking: unscale_() of shards is a collective of the ranks that own the shards; no other call
// communicates. Errors: kInvalidArgument for options out of range, for calls in another order than
// scale(), backward(), unscale_(), step(), update(), for float16 gradients that float16 cannot
// represent without the scale, and, if gradients are in shards, for different scales on the ranks.
// The scale stays equal on all ranks, because all ranks find the same gradients finite: whole
// gradients are equal on every rank, and for shards the ranks exchange what they found. Source:
// torch.amp.GradScaler and torch.distributed.fsdp.sharded_grad_scaler.
//
//   scaler.scale(loss).backward();
//   scaler.unscale_(model);   // says whether every gradient is finite
//   scaler.step(optimizer);   // skipped if an element is NaN or infinite
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
  // The scale grows after this many consecutive steps with finite gradients.
  int64_t growth_interval = 2000;
};

class CADRE_EXPORT GradScaler {
 public:
  // The state that a snapshot keeps.
  struct State {
    double scale = 0;
    int64_t num_good_steps = 0;  // steps with finite gradients since the last change of the scale
    friend bool operator==(const State&, const State&) = default;
  };

  explicit GradScaler(const GradScalerOptions& options = {});

  // Returns the loss multiplied by the scale, with its autograd graph.
  at::Tensor scale(const at::Tensor& loss) const;

  // Divides the gradients by the scale, in place, and returns whether every element on every rank
  // is finite. Throws on all ranks, and changes no gradient, if an element of a float16 gradient
  // would become 0 or, below 2^-14, lose digits: this is what the scale is to prevent. Keep such
  // parameters in float32, and compute in float16 with cadre::Autocast. torch.amp.GradScaler
  // refuses all float16 gradients, and ShardedGradScaler rounds them to 0. Gradients must be dense
  // and floating point. parameters: whole parameters with gradients that DistributedDataParallel
  // has reduced; the shards of a wrapper are an error here.
  // NOLINTBEGIN(readability-identifier-naming): torch's name for what works in place
  bool unscale_(std::span<const at::Tensor> parameters);
  bool unscale_(std::span<const ParameterShard> shards);
  // Takes any wrapper: uses its shards, or its parameters if their gradients are whole. For a
  // module that parallelize_module() has divided, pass the ParameterShards that it returned.
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

  // Calls optimizer.step() if unscale_() has found all gradients finite. Returns whether it called
  // step().
  template <typename Optimizer>
  bool step(Optimizer& optimizer) {
    if (!may_step()) return false;
    optimizer.step();
    return true;
  }

  // Computes the scale of the next step. Must be called once after each step.
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
