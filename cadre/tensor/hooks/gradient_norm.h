// Computes the joint norm of all gradients and clips it.
//
// Threads: one for the same gradients. Blocking: never; no communication. Lifetime: keeps nothing.
// Errors: kInvalidArgument for invalid options, for gradients that cannot be scaled, and, with
// error_if_nonfinite, for a norm that is not finite. Source: torch.nn.utils.clip_grad_norm_.
// Gradients must be the same on all ranks, as DistributedDataParallel leaves them; then the norm
// and the errors are the same on all ranks, too. Shards of a wrapper and parameters of a pipeline's
// stages are an error: each rank has a part of their gradients, and parallel/shard/sharded_norm.h
// computes their norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

struct ClipGradNormOptions {
  // The p of the p-norm, > 0. Infinity means the largest absolute value.
  double norm_type = 2.0;
  // Throws, before any gradient is scaled, if the norm is NaN or infinite.
  bool error_if_nonfinite = false;
};

// Scales the gradients in place by max_norm / (norm + 1e-6) if their joint p-norm is larger than
// `max_norm`; an infinite `max_norm` means no limit. Returns the norm before scaling. parameters:
// any shapes, floating-point or complex dtypes, also mixed; dense gradients. A parameter without a
// gradient does not count, and one that is in the list twice (a tied weight) counts once; without
// any gradient the norm is 0. As in PyTorch, a norm of NaN makes all gradients NaN, and an infinite
// norm scales them by 0.
//
// The norm is computed in float64 whatever the dtypes (power_sum.h). parallel/shard/sharded_norm.h
// computes the same value for the same gradients in shards. PyTorch computes it in float32, and
// rounds the norm of a float16 or bfloat16 gradient to its dtype. If the norm is at most
// `max_norm`, no gradient changes. PyTorch also scales if the norm is less than 1e-6 below
// `max_norm`.
CADRE_EXPORT double clip_grad_norm_(std::span<const at::Tensor> parameters, double max_norm,
                                    const ClipGradNormOptions& options = {});

// All overloads of clip_grad_norm_() call these two functions. check_clip_options() throws for an
// invalid norm type or limit, and limit_gradients() scales the gradients.
void check_clip_options(double max_norm, const ClipGradNormOptions& options);
void limit_gradients(const std::vector<at::Tensor>& gradients, double norm, double max_norm);

}  // namespace cadre
