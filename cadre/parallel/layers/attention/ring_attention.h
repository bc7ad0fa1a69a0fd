// Attention over a divided sequence in which keys and values travel around the ring of ranks, and
// in backward once more, with their gradients.
//
// In each of n steps a rank sends the block that it has to the next rank and receives the one of
// the rank before, while it computes with the one that it has. In backward the gradient of a block
// follows it one step later, and reaches the rank of its tokens in a last step.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward().
// Blocking: until the group's deadline, in forward and in backward, which run on all ranks.
// Lifetime: the graph keeps the group, query, key, value, output and one number for each row.
// Errors: what backward() throws begins with "backward of ring attention"; kInvalidArgument for a
// backward with create_graph.
// Cost of a rank with n ranks: messages of the bytes of its keys and values, n - 1 in forward and
// n - 1 in backward, and n of their gradients, in float32 for bfloat16 and float16.
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
