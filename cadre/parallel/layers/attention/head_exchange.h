// Attention over a divided sequence by all_to_all: each rank exchanges its tokens for heads,
// computes some heads for all tokens, and sends the results back.
//
// Threads, blocking, lifetime, errors: those of tensor/group/backward/differentiable.h. Also
// kInvalidArgument if the number of ranks does not divide the number of query heads. If it does not
// divide the number of key and value heads, these are repeated until it does. The backward runs the
// same exchanges in reverse. It supports gradients of any order, as far as libtorch's attention
// does.
// Cost for each of n ranks: a rank sends (n - 1) / n of its queries, keys, values and results, and
// in backward of their gradients.
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
