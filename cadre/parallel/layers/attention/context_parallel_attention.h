// Scaled dot-product attention of the tokens of each rank to those of all ranks of a group: what
// one process computes with the whole sequence, up to the order of additions.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward(). Blocking: until
// the group's deadline, in forward and in backward. All ranks call both, so the inputs require
// gradients on all ranks or on none, and the output of each rank must contribute to the tensor on
// which its backward() is called, also that of a rank without tokens.
// Lifetime: the graph keeps the group. Errors: cadre::Error; kInvalidArgument for tensors that do
// not fit each other or the context. In a group of one rank it is plain attention, without
// communication.
// Determinism: the order of additions is fixed by the ranks.
// Source: ring attention, https://arxiv.org/abs/2310.01889; DeepSpeed Ulysses,
// https://arxiv.org/abs/2309.14509. docs/decisions/0018-context-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/attention/attention_options.h"
#include "cadre/parallel/layers/context_parallel.h"

namespace cadre {

// T: context.num_own_tokens(), in the order of context.shard(). query: (B, H, T, D), key: (B, H_kv,
// T, D), value: (B, H_kv, T, D_v), floating-point, of one dtype; H is a multiple of H_kv, and query
// head h uses key head h / (H / H_kv). B and the numbers of heads are the same on all ranks.
// Result: (B, H, T, D_v). kRing computes in float32 for bfloat16 and float16. With dropout, the
// mask is that of one process.
CADRE_EXPORT at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value,
                                                   const ContextParallel& context,
                                                   const AttentionOptions& options = {});

}  // namespace cadre
