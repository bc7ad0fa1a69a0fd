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
  at::Tensor experts;        // (n, k), int64: indices of the k largest logits, descending
  at::Tensor weights;        // (n, k): probabilities of these experts, or shares of their sum
};

struct RouterOptions {
  int64_t num_selected;  // k
  bool normalize_weights;
};

// Chooses experts for n tokens. logits: (n, E). Ties go to the lower index.
RouterChoices choose_experts(const at::Tensor& logits, const RouterOptions& options);

}  // namespace cadre::parallel
