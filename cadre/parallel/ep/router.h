// The choices of a router: which experts process a token, and with which weights.
//
// Threads: a pure function. Blocking: never. Lifetime: the results are new tensors.
// Errors: none. Source: Shazeer and others, https://arxiv.org/abs/1701.06538.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cadre::parallel {

struct RouterChoices {
  at::Tensor probabilities;  // (n, E): the softmax of the logits
  at::Tensor log_sums;       // (n): the logarithm of the sum of the exponentials of the logits
  at::Tensor experts;        // (n, k), int64: the k largest logits, in descending order
  at::Tensor weights;        // (n, k): their probabilities, or shares of the sum of these
};

struct RouterOptions {
  int64_t num_selected;  // k
  bool normalize_weights;
};

// logits: (n, E), of n tokens. Ties go to the lower index.
RouterChoices choose_experts(const at::Tensor& logits, const RouterOptions& options);

}  // namespace cadre::parallel
