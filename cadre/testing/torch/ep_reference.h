// Computes a mixture of experts by its definition, token by token and expert by expert in one
// process, as the expected result in tests of the layer.
//
// Threads: pure functions. Blocking: never.
#pragma once

#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "cadre/parallel/ep/mixture_of_experts.h"

namespace cadre::testing {

using torch::Tensor;

struct ExpertReference {
  Tensor values;        // (n, D)
  Tensor load_balance;  // ()
  Tensor z;             // ()
  std::vector<int64_t> choices_of_expert;
  int64_t num_dropped = 0;
  // The smallest difference, over all tokens, between the logit of a chosen expert and the next
  // smaller logit of the same token.
  double smallest_gap = 1e9;
};

// The parameters of all experts and of the router.
struct ExpertWeights {
  Tensor router, up_weight, up_bias, down_weight, down_bias;
  std::vector<Tensor> all() const { return {router, up_weight, up_bias, down_weight, down_bias}; }
};

// Returns the selected (top-k) experts of each token, the one with the largest logit first.
inline std::vector<std::vector<int64_t>> best_experts(const Tensor& logits, int64_t num_selected,
                                                      double& smallest_gap) {
  std::vector<std::vector<int64_t>> chosen;
  for (int64_t token = 0; token < logits.size(0); ++token) {
    const auto logit = [&](int64_t expert) { return logits[token][expert].item<double>(); };
    std::vector<int64_t> ranked;
    for (int64_t place = 0; place <= num_selected && place < logits.size(1); ++place) {
      int64_t best = -1;
      for (int64_t expert = 0; expert < logits.size(1); ++expert) {
        if (std::find(ranked.begin(), ranked.end(), expert) != ranked.end()) continue;
        if (best < 0 || logit(expert) > logit(best)) best = expert;
      }
      if (!ranked.empty()) {
        smallest_gap = std::min(smallest_gap, logit(ranked.back()) - logit(best));
      }
      ranked.push_back(best);
    }
    ranked.resize(static_cast<size_t>(num_selected));
    chosen.push_back(ranked);
  }
  return chosen;
}

inline Tensor output_of_expert(const ExpertWeights& weights, int64_t expert, const Tensor& token) {
  const Tensor hidden = torch::gelu(weights.up_weight[expert].mv(token) + weights.up_bias[expert]);
  return weights.down_weight[expert].mv(hidden) + weights.down_bias[expert];
}

// Computes the whole layer. x: (n, D), the tokens of all ranks; n > 0.
inline ExpertReference reference_of(const ExpertWeights& weights, const Tensor& x,
                                    const MixtureOfExpertsOptions& options) {
  ExpertReference result;
  const int64_t num_tokens = x.size(0);
  const Tensor exponentials = x.matmul(weights.router.t()).exp();
  const Tensor probabilities = exponentials / exponentials.sum(1, true);
  const auto chosen = best_experts(x.matmul(weights.router.t()).detach(), options.num_selected,
                                   result.smallest_gap);
  const double mean_choices = static_cast<double>(num_tokens * options.num_selected) /
                              static_cast<double>(options.num_experts);
  std::vector<int64_t> num_processed(static_cast<size_t>(options.num_experts));
  result.choices_of_expert.resize(num_processed.size());
  std::vector<Tensor> sums(static_cast<size_t>(num_tokens));
  for (Tensor& sum : sums) sum = torch::zeros({options.features}, x.options().requires_grad(false));
  for (int64_t choice = 0; choice < options.num_selected; ++choice) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      const int64_t expert = chosen[token][choice];
      ++result.choices_of_expert[expert];
      if (options.capacity_factor &&
          num_processed[expert] >= std::ceil(*options.capacity_factor * mean_choices)) {
        ++result.num_dropped;
        continue;
      }
      ++num_processed[expert];
      Tensor weight = probabilities[token][expert];
      if (options.normalize_weights) {
        Tensor sum = torch::zeros({}, x.options().requires_grad(false));
        for (const int64_t other : chosen[token]) sum = sum + probabilities[token][other];
        weight = weight / sum;
      }
      sums[token] = sums[token] + weight * output_of_expert(weights, expert, x[token]);
    }
  }
  result.values = torch::stack(sums);
  result.load_balance = torch::zeros({}, x.options().requires_grad(false));
  for (int64_t expert = 0; expert < options.num_experts; ++expert) {
    const double share = static_cast<double>(result.choices_of_expert[expert]) /
                         static_cast<double>(num_tokens * options.num_selected);
    result.load_balance = result.load_balance + static_cast<double>(options.num_experts) * share *
                                                    probabilities.select(1, expert).mean();
  }
  result.z = exponentials.sum(1).log().pow(2).mean();
  return result;
}

// Returns deterministic values of the magnitude of weights, from a smooth function of the index.
inline Tensor smooth_numbers(at::IntArrayRef shape, double seed) {
  const int64_t count = c10::multiply_integers(shape);
  return (torch::arange(count, torch::kDouble) * 0.7 + seed).sin().view(shape) * 0.5;
}

}  // namespace cadre::testing
