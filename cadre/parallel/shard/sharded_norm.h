// The joint norm of gradients of which each rank has a part, and its limit: the norm that one
// process with all of them would have.
//
// Threads: one for the same gradients. Blocking: collective, along the flat axis and the axes with
// Shard placements of the parameters, until the deadline of their groups: all ranks call it, also
// one that owns no element. Lifetime: keeps nothing.
// Errors: those of tensor/hooks/gradient_norm.h, the same on all ranks; kInvalidArgument for a
// gradient that is not dense, or whose placement is Partial.
//
// Each rank sums the powers of its elements in float64, whatever their dtype, and the sums are
// added along those axes; along replicated axes nothing is added. All ranks get the same bits: if
// flat shards may end at different places along an axis, because it divides other parameters, the
// ranks of that axis take the largest of their sums, which differ in the last bits. With another
// number of ranks only the order of the float64 additions differs: the result is within 1e-12 of
// the norm of the exact real numbers, for up to 1e12 elements.
// Source: torch.nn.utils.clip_grad_norm_ on DTensors.
#pragma once

#include <span>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/model_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/gradient_norm.h"

namespace cadre {

// Returns the p-norm of the gradients of all `values`; one without a gradient does not count.
CADRE_EXPORT double gradient_norm(std::span<const ParameterShard> shards, double norm_type = 2.0);

// Scales this rank's gradients like the clip_grad_norm_() of tensor/hooks/gradient_norm.h, by the
// norm over all ranks; returns the norm before.
CADRE_EXPORT double clip_grad_norm_(std::span<const ParameterShard> shards, double max_norm,
                                    const ClipGradNormOptions& options = {});

// Takes any wrapper: uses its shards if it has them, else its parameters, whose gradients are whole
// and the same on all ranks.
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
