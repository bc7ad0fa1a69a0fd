// A mixture-of-experts layer. A router selects for each token a few of many MLPs, the experts; the
// output for the token is the weighted sum of the outputs of its experts.
//
//   cadre::MixtureOfExperts experts(cadre::MixtureOfExpertsOptions{
//       .features = 512, .hidden_features = 2048, .num_experts = 8});
//   auto [values, losses, statistics] = experts(x);   // as x; the auxiliary losses of the router
//   loss = loss_of(values) + losses.weighted({.load_balance = 0.01, .z = 0.001});
//
// The layer computes without communication until ExpertParallel (expert_parallel.h) divides the
// experts of a module among ranks. Then a forward sends each token to the ranks that have its
// experts, and the results equal those of one process that has the tokens of all ranks in rank
// order.
//
// Threads: as the module. Blocking: the forward() of a divided layer, and its backward, communicate
// until the group's deadline. Every rank must call them, even without a token, and the output must
// contribute to the loss on every rank. Lifetime: a divided layer keeps its groups.
// Errors: cadre::Error, kInvalidArgument for invalid options, and for inputs of invalid sizes,
// dtype or device. Source: https://arxiv.org/abs/1701.06538; GShard,
// https://arxiv.org/abs/2006.16668; Switch Transformer, https://arxiv.org/abs/2101.03961; the
// z-loss of ST-MoE, https://arxiv.org/abs/2202.08906. docs/decisions/0019-expert-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre {

namespace parallel {
struct ExpertGroups;
struct DispatchPlan;
struct RouterChoices;
}  // namespace parallel

class ExpertParallel;

enum class ExpertActivation : uint8_t { kGelu, kRelu, kSilu };

struct MixtureOfExpertsOptions {
  int64_t features;         // the number of features of a token: D
  int64_t hidden_features;  // the hidden size of each expert
  int64_t num_experts;
  int64_t num_selected = 2;  // the number of experts that the router selects for a token
  // If true, the weights of a token's selected experts are their probabilities divided by the sum
  // of these probabilities. If false, they are the probabilities.
  bool normalize_weights = true;
  // An expert processes at most this factor times the mean number of choices for each expert
  // (tokens of all ranks * num_selected / num_experts), rounded up. Further choices of this expert
  // are dropped: they get the weight 0, and the other weights of the token do not change. All first
  // choices have priority over all second ones; among equal choices the tokens have priority in
  // rank order. If nullopt, nothing is dropped.
  std::optional<double> capacity_factor = {};
  ExpertActivation activation = ExpertActivation::kGelu;
  bool bias = true;  // whether the experts have biases; the router has none
};

struct RouterLossWeights {
  double load_balance = 0;
  double z = 0;
};

// The auxiliary losses of the router of one layer, or their sums over layers; each has the shape
// (). They are computed from the tokens of all ranks and equal on all ranks. The backward on a rank
// computes the gradients from the rank's own tokens only, so gradients of parameters must be summed
// over ranks, as ExpertParallel::sum_gradients() does. The losses are 0 if no rank has a token.
struct RouterLosses {
  // The load-balance loss: num_experts * sum over experts e of f_e * p_e, where f_e is the fraction
  // of all choices that select e, including dropped ones, and p_e the mean probability of e. It is
  // 1 if all experts are equally probable.
  at::Tensor load_balance;
  // The z-loss: the mean over tokens of the squared log-sum-exp of the logits.
  at::Tensor z;

  CADRE_EXPORT RouterLosses& operator+=(const RouterLosses& other);
  CADRE_EXPORT at::Tensor weighted(const RouterLossWeights& weights) const;
};

// Counts over the tokens of all ranks. They are equal on all ranks.
struct RouterStatistics {
  // The number of choices that select each expert, including dropped ones: (num_experts), int64.
  at::Tensor choices_of_expert;
  int64_t num_tokens;
  int64_t num_dropped;  // the number of dropped choices
};

// The output is a struct, so that a program that uses `values` also notices the losses.
struct [[nodiscard]] MixtureOfExpertsOutput {
  at::Tensor values;
  RouterLosses losses;
  RouterStatistics statistics;
};
// A wrapper of a module calls this to find the tensors in RouterLosses; see
// tensor/hooks/output_tensors.h.
CADRE_EXPORT std::vector<at::Tensor> held_tensors(const RouterLosses& losses);
CADRE_EXPORT std::vector<at::Tensor> held_tensors(const MixtureOfExpertsOutput& output);

// Parameters, initialized as torch::nn::Linear does: router.weight (num_experts, D), and with one
// entry for each expert up_weight (num_experts, hidden, D), up_bias (num_experts, hidden),
// down_weight (num_experts, D, hidden) and down_bias (num_experts, D). A divided layer has only the
// entries of this rank's experts.
class CADRE_EXPORT MixtureOfExpertsImpl : public torch::nn::Module {
 public:
  explicit MixtureOfExpertsImpl(const MixtureOfExpertsOptions& options);

  // input: (..., D), the tokens of this rank, perhaps none. values: (..., D). The router computes
  // in float32, or in float64 for float64 inputs, even under autocast.
  MixtureOfExpertsOutput forward(const at::Tensor& input);

  MixtureOfExpertsOptions options;
  torch::nn::Linear router{nullptr};
  at::Tensor up_weight, up_bias, down_weight, down_bias;

  // Returns the names of the parameters that have one entry for each expert.
  std::vector<std::string> names_of_expert_parameters() const;
  // Returns whether ExpertParallel has divided the experts.
  bool is_divided() const { return groups_ != nullptr; }

 private:
  friend class ExpertParallel;
  // Keeps the entries of this rank's experts and drops the others. `name` is the layer's name, for
  // error messages.
  void divide(std::shared_ptr<const parallel::ExpertGroups> groups, const std::string& name);
  at::Tensor router_logits(const at::Tensor& tokens) const;
  RouterLosses losses_of(const parallel::RouterChoices& choices,
                         const parallel::DispatchPlan& plan) const;
  at::Tensor outputs_of_experts(const at::Tensor& rows, const std::vector<int64_t>& sizes) const;

  // All layers that were divided together share these groups. If null, the layer is not divided.
  std::shared_ptr<const parallel::ExpertGroups> groups_;
};
TORCH_MODULE(MixtureOfExperts);

}  // namespace cadre
