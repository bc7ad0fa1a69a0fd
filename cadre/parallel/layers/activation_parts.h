// Parts of activations on the ranks of a group, as layers of tensor parallelism exchange them: even
// shards of the sequence, and chunks of the features, which may be uneven.
//
// Threads: as ProcessGroup. Blocking: until the collective is done, in forward and in backward.
// Lifetime: the graph keeps the group. Errors: as tensor/group/backward/differentiable.h;
// kInvalidArgument for a sequence whose length the ranks do not divide. Activations: (..., T, D),
// at least 2 dimensions.
// Source: Megatron-LM, https://arxiv.org/abs/2205.05198.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cadre/tensor/group/process_group.h"

namespace cadre {

// parts_first() returns (..., T, D) as (ranks, ..., T / ranks, D), contiguous, as reduce_scatter
// takes it; parts_in_place() does the reverse.
at::Tensor parts_first(const at::Tensor& input, const ProcessGroup& group);
at::Tensor parts_in_place(const at::Tensor& parts);

// gather_sequence() makes (..., T, D) from (..., T / ranks, D), before a layer whose ranks compute
// parts of the output. reduce_scatter_sequence() sums (..., T, D) over the ranks and cuts the sum.
// Each is the other's backward.
at::Tensor gather_sequence(const at::Tensor& input, const ProcessGroup& group);
at::Tensor reduce_scatter_sequence(const at::Tensor& input, const ProcessGroup& group);

// scatter_features() returns this rank's chunk of the last dimension, by the rule of Shard
// (tensor/mesh/layout.h), of an input that is whole on every rank; gather_features() returns all
// `features` from the chunks. Each is the other's backward.
at::Tensor scatter_features(const at::Tensor& input, const ProcessGroup& group);
at::Tensor gather_features(const at::Tensor& input, const ProcessGroup& group, int64_t features);

}  // namespace cadre
