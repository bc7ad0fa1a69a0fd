// Attention over a divided sequence in which blocks of keys and values are passed around the ring
// of ranks. In the backward they are passed around again, together with their gradients.
//
// In each of n steps a rank sends its current block to the next rank and receives a block from the
// previous rank, while it computes with its current block. In backward the gradient of a block
// follows the block one step later. After a last step it is on the rank that owns the block's
// tokens.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward().
// Blocking: until the group's deadline, in forward and in backward, which run on all ranks.
// Lifetime: the graph keeps the group, query, key, value, output and the log-sum-exp of each row.
// Errors: errors in backward() begin with "backward of ring attention"; kInvalidArgument for a
// backward with create_graph.
// Cost for each of n ranks: messages of the size of its keys and values, n - 1 in forward and n - 1
// in backward, and n messages with their gradients, in float32 for bfloat16 and float16.
// Source: https://arxiv.org/abs/2310.01889.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/parallel/layers/attention/attention_options.h"
#include "cadre/parallel/layers/context_parallel.h"

namespace cadre {

// Computes context_parallel_attention() in the ring form. REQUIRES: the caller has checked the
// tensors.
at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ContextParallel& context, const AttentionOptions& options);

}  // namespace cadre
