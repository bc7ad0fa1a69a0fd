// A mixture-of-experts layer: a router chooses for each token a few of many MLPs, the experts, and
// the output of the token is the weighted sum of theirs.
//
//   cadre::MixtureOfExperts experts(cadre::MixtureOfExpertsOptions{
//       .features = 512, .hidden_features = 2048, .num_experts = 8});
//   auto [values, losses, statistics] = experts(x);   // as x; the auxiliary losses of the router
//   loss = loss_of(values) + losses.weighted({.load_balance = 0.01, .z = 0.001});
//
// It computes alone until ExpertParallel (expert_parallel.h) divides the experts of a module among
// ranks. Then a forward exchanges tokens with the ranks that have their experts, and its numbers
// are those of one process that has the tokens of all ranks in rank order.
//
// Threads: as the module. Blocking: forward() of a divided layer, and its backward, communicate
// until the group's deadline; every rank calls them, also one without a token, and the output
// contributes to the loss on every rank. Lifetime: a divided layer keeps its groups.
// Errors: cadre::Error, kInvalidArgument for options, and for the sizes, dtype and device of
// inputs. Source: https://arxiv.org/abs/1701.06538; GShard, https://arxiv.org/abs/2006.16668;
// Switch Transformer, https://arxiv.org/abs/2101.03961; the z-loss of ST-MoE,
// https://arxiv.org/abs/2202.08906. docs/decisions/0019-expert-parallel.md.
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
  int64_t features;         // the size of a token: D
  int64_t hidden_features;  // the hidden size of each expert
  int64_t num_experts;
  int64_t num_selected = 2;  // the number of experts for each token
  // The weights of a token are its probabilities of the chosen experts, divided by their sum. If
  // false, they are the probabilities.
  bool normalize_weights = true;
  // An expert processes at most this factor times the mean number of choices, rounded up. Further
  // choices are dropped: they have the weight 0, and the other weights of the token stay. The first
  // choices of all tokens come before all second ones, and among these the tokens come in the order
  // of the ranks. If nullopt, nothing is dropped.
  std::optional<double> capacity_factor = {};
  ExpertActivation activation = ExpertActivation::kGelu;
  bool bias = true;  // is for the experts; the router has no bias
};

struct RouterLossWeights {
  double load_balance = 0;
  double z = 0;
};

// Losses of one layer, or summed over layers, each of shape (). Computed from the tokens of all
// ranks and equal on all ranks. Their gradients on a rank are those of its own tokens, so gradients
// of parameters are summed over ranks, as ExpertParallel::sum_gradients() does. 0 if no rank has a
// token.
struct RouterLosses {
  // The number of experts times the sum over experts of its share of the choices, dropped ones
  // included, times its mean probability: 1 if all experts are equally probable.
  at::Tensor load_balance;
  // The mean of the squared logarithm of the sum of the exponentials of the logits.
  at::Tensor z;

  CADRE_EXPORT RouterLosses& operator+=(const RouterLosses& other);
  CADRE_EXPORT at::Tensor weighted(const RouterLossWeights& weights) const;
};

// Counts over the tokens of all ranks, equal on all ranks.
struct RouterStatistics {
  // Has the shape (num_experts) and dtype int64; dropped choices are included.
  at::Tensor choices_of_expert;
  int64_t num_tokens;
  int64_t num_dropped;  // the number of dropped choices
};

// This is a struct, so that a program that uses `values` also sees the losses.
struct [[nodiscard]] MixtureOfExpertsOutput {
  at::Tensor values;
  RouterLosses losses;
  RouterStatistics statistics;
};
// Called by the wrapper of a module that returns RouterLosses; see tensor/hooks/output_tensors.h.
CADRE_EXPORT std::vector<at::Tensor> held_tensors(const RouterLosses& losses);
CADRE_EXPORT std::vector<at::Tensor> held_tensors(const MixtureOfExpertsOutput& output);

// Parameters, drawn as torch::nn::Linear draws its own: router.weight (num_experts, D), and one
// entry for each expert in up_weight (num_experts, hidden, D), up_bias (num_experts, hidden),
// down_weight (num_experts, D, hidden), down_bias (num_experts, D). A divided layer has those of
// this rank's experts.
class CADRE_EXPORT MixtureOfExpertsImpl : public torch::nn::Module {
 public:
  explicit MixtureOfExpertsImpl(const MixtureOfExpertsOptions& options);

  // input: (..., D), this rank's tokens, 0 or more. values: (..., D). The router computes in
  // float32, or in float64 for inputs of that dtype, whatever autocast says.
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
  // Keeps the entries of this rank's experts. name: the layer's name, for messages.
  void divide(std::shared_ptr<const parallel::ExpertGroups> groups, const std::string& name);
  at::Tensor router_logits(const at::Tensor& tokens) const;
  RouterLosses losses_of(const parallel::RouterChoices& choices,
                         const parallel::DispatchPlan& plan) const;
  at::Tensor outputs_of_experts(const at::Tensor& rows, const std::vector<int64_t>& sizes) const;

  // The layers that are divided together share it. If it is null, the layer computes alone.
  std::shared_ptr<const parallel::ExpertGroups> groups_;
};
TORCH_MODULE(MixtureOfExperts);

}  // namespace cadre
