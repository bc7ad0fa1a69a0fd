// Linear functions whose weights are divided among the ranks of a group, and their backwards.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward().
// Blocking: until the collectives are done. Lifetime: the graph keeps the group.
// Errors: as tensor/group/backward/differentiable.h; what backward() throws begins with "backward
// of" and the name. Equality: the ranks compute what one process with the whole weights would, up
// to the order of additions. All ranks compute the same loss, which counts once: the gradients are
// not those of a sum over ranks. Cost: the backward of the column-parallel function reduces the
// gradient of the input while it computes that of the weight. A backward with create_graph is
// right, and computes the forward again.
// Source: Megatron-LM, https://arxiv.org/abs/1909.08053 and https://arxiv.org/abs/2205.05198.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

struct ParallelLinearOptions {
  // The input of the column-parallel function, and the output of the row-parallel one, is this
  // rank's shard (..., T / ranks, D) of the sequence.
  bool sequence_parallel = false;
};

// input: (..., in), whole on every rank, or with sequence_parallel a shard; weight: (out_part, in),
// bias: (out_part) or undefined: this rank's rows of them. Result: (..., out_part), this rank's
// features. With sequence_parallel the gathered input is not kept for backward but gathered again.
CADRE_EXPORT at::Tensor column_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                                               const at::Tensor& bias, const ProcessGroup& group,
                                               const ParallelLinearOptions& options = {});

// input: (..., in_part), this rank's features; weight: (out, in_part), this rank's columns; bias:
// (out), the same on every rank, or undefined. Result: (..., out), whole on every rank, or with
// sequence_parallel a shard. The bias is added once, after the sum over the ranks.
CADRE_EXPORT at::Tensor row_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                                            const at::Tensor& bias, const ProcessGroup& group,
                                            const ParallelLinearOptions& options = {});

}  // namespace cadre
