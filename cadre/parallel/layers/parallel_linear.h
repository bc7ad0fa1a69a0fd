// Linear functions whose weights are divided among the ranks of a group, and their backwards.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward().
// Blocking: until the collectives are done. Lifetime: the graph keeps the group.
// Errors: those of tensor/group/backward/differentiable.h. Errors in backward() begin with
// "backward of" and the name of the function.
// Result: what one process with the whole weights computes, up to the order of additions. All ranks
// compute the same loss, which counts once: gradients are not those of a sum over the ranks'
// losses.
// Cost: the backward of the column-parallel function all-reduces the gradient of the input while it
// computes the gradient of the weight (overlap). A backward with create_graph gives correct
// results, but computes the forward again.
// Source: Megatron-LM, https://arxiv.org/abs/1909.08053 and https://arxiv.org/abs/2205.05198.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

struct ParallelLinearOptions {
  // If true, the input of the column-parallel function and the output of the row-parallel function
  // are this rank's shard (..., T / ranks, D) of the sequence.
  bool sequence_parallel = false;
};

// input: (..., in), whole on every rank, or with sequence_parallel this rank's shard of the
// sequence. weight: (out_part, in) and bias: (out_part) or undefined, this rank's rows of them.
// Result: (..., out_part), this rank's features. With sequence_parallel the gathered input is not
// saved for backward but gathered again.
CADRE_EXPORT at::Tensor column_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                                               const at::Tensor& bias, const ProcessGroup& group,
                                               const ParallelLinearOptions& options = {});

// input: (..., in_part), this rank's features. weight: (out, in_part), this rank's columns. bias:
// (out), the same on every rank, or undefined. Result: (..., out), whole on every rank, or with
// sequence_parallel this rank's shard of the sequence. The bias is added once, after the sum over
// the ranks.
CADRE_EXPORT at::Tensor row_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                                            const at::Tensor& bias, const ProcessGroup& group,
                                            const ParallelLinearOptions& options = {});

}  // namespace cadre
