// Computes what a router selects: which experts process a token, and with which weights.
//
// Source: Shazeer and others, https://arxiv.org/abs/1701.06538.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cadre::parallel {

struct RouterChoices {
  at::Tensor probabilities;  // (n, E): the softmax of the logits
  at::Tensor log_sums;       // (n): the log-sum-exp of the logits
  at::Tensor experts;        // (n, k), int64: indices of the k largest logits, descending
  at::Tensor weights;        // (n, k): the probabilities of these experts, or normalized ones
};

struct RouterOptions {
  int64_t num_selected;  // k
  bool normalize_weights;
};

// Selects k experts for each of n tokens. logits: (n, E). Among equal logits the lower index is
// selected.
RouterChoices choose_experts(const at::Tensor& logits, const RouterOptions& options);

}  // namespace cadre::parallel
