// Attention over a divided sequence in which the ranks exchange tokens for heads: each computes
// some heads for all tokens, and sends the results back.
//
// Threads, blocking, lifetime, errors: as tensor/group/backward/differentiable.h; kInvalidArgument
// for query heads that the ranks do not divide. Key and value heads that they do not divide are
// repeated until they do. The backward runs the exchanges in reverse; it has a backward of every
// order that the attention of libtorch has.
// Cost of a rank with n ranks: (n - 1) / n of its queries, keys, values and results are sent, and
// their gradients in backward.
// Source: DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/parallel/layers/attention/attention_options.h"
#include "cadre/parallel/layers/context_parallel.h"

namespace cadre {

// Computes context_parallel_attention() by exchanging tokens for heads. REQUIRES: the caller has
// checked the tensors.
at::Tensor attention_by_heads(const at::Tensor& query, const at::Tensor& key,
                              const at::Tensor& value, const ContextParallel& context,
                              const AttentionOptions& options);

}  // namespace cadre
