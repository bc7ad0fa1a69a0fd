// The collectives with which tensor-parallel layers exchange parts of activations: equal shards of
// the sequence, and chunks of the features, which may have unequal sizes. Activations have the
// shape (..., T, D), at least 2 dimensions.
//
// Threads: as ProcessGroup. Blocking: until the collective is done, in forward and in backward.
// Lifetime: the graph keeps the group. Errors: those of tensor/group/backward/differentiable.h;
// kInvalidArgument if the number of ranks does not divide the length of the sequence.
// Source: Megatron-LM, https://arxiv.org/abs/2205.05198.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "cadre/tensor/group/process_group.h"

namespace cadre {

// parts_first() rearranges (..., T, D) to (ranks, ..., T / ranks, D), contiguous, as the input of a
// reduce_scatter; parts_in_place() is the inverse.
at::Tensor parts_first(const at::Tensor& input, const ProcessGroup& group);
at::Tensor parts_in_place(const at::Tensor& parts);

// gather_sequence() gathers (..., T / ranks, D) to (..., T, D), for a layer in which each rank
// computes a part of the output. reduce_scatter_sequence() sums (..., T, D) over the ranks and
// returns this rank's shard of the sum. Each is the other's backward.
at::Tensor gather_sequence(const at::Tensor& input, const ProcessGroup& group);
at::Tensor reduce_scatter_sequence(const at::Tensor& input, const ProcessGroup& group);

// scatter_features() returns this rank's chunk of the last dimension, by the rule of Shard
// (tensor/mesh/layout.h); the input is whole and equal on every rank. gather_features() gathers the
// chunks to all `features`. Each is the other's backward.
at::Tensor scatter_features(const at::Tensor& input, const ProcessGroup& group);
at::Tensor gather_features(const at::Tensor& input, const ProcessGroup& group, int64_t features);

}  // namespace cadre
