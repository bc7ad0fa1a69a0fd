// Scaled dot-product attention over a sequence that is divided among the ranks of a group: each
// rank's queries attend to the keys of all ranks. The result is that of one process with the whole
// sequence, up to the order of additions.
//
// Threads: as ProcessGroup; the backward runs in the thread that called backward(). Blocking: until
// the group's deadline, in forward and in backward. All ranks must call both. So the inputs require
// gradients on all ranks or on none, and the output of each rank, even of one without tokens, must
// contribute to the tensor whose backward() is called.
// Lifetime: the graph keeps the group. Errors: cadre::Error; kInvalidArgument for tensors whose
// sizes or dtypes do not fit each other or the context. In a group of one rank this is ordinary
// attention, without communication.
// Determinism: the order of additions is fixed by the ranks.
// Source: ring attention, https://arxiv.org/abs/2310.01889; DeepSpeed Ulysses,
// https://arxiv.org/abs/2309.14509. docs/decisions/0018-context-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/attention/attention_options.h"
#include "cadre/parallel/layers/context_parallel.h"

namespace cadre {

// query: (B, H, T, D), key: (B, H_kv, T, D), value: (B, H_kv, T, D_v). T is
// context.num_own_tokens(), in the order of context.shard(). All are floating-point tensors of one
// dtype; H is a multiple of H_kv, and query head h uses key head h / (H / H_kv). B and the numbers
// of heads are the same on all ranks. Result: (B, H, T, D_v). The ring form computes in float32 for
// bfloat16 and float16. Dropout uses the same mask as one process with the whole sequence would.
CADRE_EXPORT at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value,
                                                   const ContextParallel& context,
                                                   const AttentionOptions& options = {});

}  // namespace cadre
