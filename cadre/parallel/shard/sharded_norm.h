// Computes the norm of all gradients of a model whose gradients are divided among ranks, and clips
// them by it. The norm equals that of one process with all gradients.
//
// Blocking: the functions are collectives over the ranks that divide the parameters, along flat
// axes and axes with Shard placements, until the deadline of their groups. All ranks call them,
// also a rank that owns no element. Errors: those of tensor/hooks/gradient_norm.h, the same on all
// ranks; kInvalidArgument for a gradient that is not dense, or whose placement is Partial.
//
// Each rank adds up the powers of its elements in float64, whatever their dtype. The sums are
// all_reduced along the axes that divide the parameters, and not along replicated axes. All ranks
// get the same bits. To ensure this, replicas take the largest of their sums where these may differ
// in the last bits: tensor parallelism may leave replicas of a parameter with different flat
// shards, and so with another order of additions. The number of ranks changes only the order of the
// float64 additions: the relative error is below 1e-12 for up to 1e12 elements. Source:
// torch.nn.utils.clip_grad_norm_ on DTensors.
#pragma once

#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/model_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/gradient_norm.h"

namespace cadre {

// Returns the p-norm of the gradients of all `values`, p = norm_type. Values without a gradient do
// not count.
CADRE_EXPORT double gradient_norm(std::span<const ParameterShard> shards, double norm_type = 2.0);

// Scales this rank's gradients like the clip_grad_norm_() of tensor/hooks/gradient_norm.h, but with
// the norm over all ranks. Returns the norm before the scaling.
CADRE_EXPORT double clip_grad_norm_(std::span<const ParameterShard> shards, double max_norm,
                                    const ClipGradNormOptions& options = {});

// Takes any wrapper or a plain module. Uses the gradients of its shards if it has shards, else
// those of its parameters, which are whole and equal on all ranks. For a module that
// parallelize_module() has divided, also within DistributedDataParallel, pass the ParameterShards
// that it returned; the module or its wrapper throws kInvalidArgument.
template <HasGradients Model>
double clip_grad_norm_(Model& model, double max_norm, const ClipGradNormOptions& options = {}) {
  return shard::with_gradients_of(
      model,
      [&](std::span<const ParameterShard> shards) {
        return clip_grad_norm_(shards, max_norm, options);
      },
      [&](auto& whole) {
        const std::vector<at::Tensor> parameters = whole.parameters();
        return clip_grad_norm_(std::span<const at::Tensor>(parameters), max_norm, options);
      });
}

}  // namespace cadre
