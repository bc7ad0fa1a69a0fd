#include "cadre/parallel/ep/mixture_of_experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ep/router.h"
#include "cadre/parallel/ep/token_dispatch.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {
namespace {

[[noreturn]] void refuse_mixture(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("MixtureOfExperts: {}", problem));
}

void check_options(const MixtureOfExpertsOptions& options) {
  if (options.features < 1 || options.hidden_features < 1 || options.num_experts < 1) {
    refuse_mixture(format("features {}, hidden_features {} and num_experts {} must be at least 1",
                          options.features, options.hidden_features, options.num_experts));
  }
  if (options.num_selected < 1 || options.num_selected > options.num_experts) {
    refuse_mixture(format("num_selected is {}, expected 1 to {}, the number of experts",
                          options.num_selected, options.num_experts));
  }
  if (options.num_selected == 1 && options.normalize_weights) {
    refuse_mixture(
        "the normalized weight of one selected expert is 1, so the router would learn nothing from "
        "the output; set normalize_weights = false, or num_selected to 2 or more");
  }
  if (options.capacity_factor &&
      !(std::isfinite(*options.capacity_factor) && *options.capacity_factor > 0)) {
    refuse_mixture(
        format("capacity_factor is {}, expected a number larger than 0; leave it out to drop no "
               "choice",
               *options.capacity_factor));
  }
}

at::Tensor drawn(at::IntArrayRef sizes, int64_t fan_in) {
  const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
  return torch::empty(sizes).uniform_(-bound, bound);
}

at::Tensor activated(const at::Tensor& hidden, ExpertActivation activation) {
  switch (activation) {
    case ExpertActivation::kGelu:
      return at::gelu(hidden);
    case ExpertActivation::kRelu:
      return at::relu(hidden);
    case ExpertActivation::kSilu:
      return at::silu(hidden);
  }
  return hidden;
}

// Returns the slice of `parameter` for each expert, or undefined tensors if the layer has no such
// parameter (a bias).
std::vector<at::Tensor> by_expert(const at::Tensor& parameter, size_t num_experts) {
  // The backward of unbind() stacks the gradients of all experts once. That of select() would fill
  // a tensor of the whole size for each expert.
  return parameter.defined() ? parameter.unbind(0) : std::vector<at::Tensor>(num_experts);
}

at::Tensor linear(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::linear(rows, weight, bias) : at::linear(rows, weight);
}

}  // namespace

RouterLosses& RouterLosses::operator+=(const RouterLosses& other) {
  // The additions are not in place, because autograd needs the tensors, and `load_balance` and `z`
  // are undefined at first.
  load_balance = load_balance.defined() ? load_balance + other.load_balance : other.load_balance;
  z = z.defined() ? z + other.z : other.z;
  return *this;
}

at::Tensor RouterLosses::weighted(const RouterLossWeights& weights) const {
  return load_balance * weights.load_balance + z * weights.z;
}

std::vector<at::Tensor> held_tensors(const RouterLosses& losses) {
  return {losses.load_balance, losses.z};
}

std::vector<at::Tensor> held_tensors(const MixtureOfExpertsOutput& output) {
  return {output.values, output.losses.load_balance, output.losses.z};
}

MixtureOfExpertsImpl::MixtureOfExpertsImpl(const MixtureOfExpertsOptions& given) : options(given) {
  check_options(options);
  const auto& [features, hidden, num_experts] =
      std::tie(options.features, options.hidden_features, options.num_experts);
  router = register_module(
      "router", torch::nn::Linear(torch::nn::LinearOptions(features, num_experts).bias(false)));
  up_weight = register_parameter("up_weight", drawn({num_experts, hidden, features}, features));
  if (options.bias) up_bias = register_parameter("up_bias", drawn({num_experts, hidden}, features));
  down_weight = register_parameter("down_weight", drawn({num_experts, features, hidden}, hidden));
  if (options.bias) {
    down_bias = register_parameter("down_bias", drawn({num_experts, features}, hidden));
  }
}

MixtureOfExpertsOutput MixtureOfExpertsImpl::forward(const at::Tensor& input) {
  if (input.dim() == 0 || input.size(-1) != options.features) {
    refuse_mixture(
        format("the input has the sizes {}, but the last one must be the {} features of a token",
               list_of(input.sizes()), options.features));
  }
  if (!at::isFloatingType(input.scalar_type()) || input.is_meta()) {
    refuse_mixture(format("the input is {} on {}, expected a floating-point tensor with values",
                          c10::toString(input.scalar_type()), input.device().str()));
  }
  const at::Tensor tokens = input.reshape({-1, options.features});
  const parallel::RouterChoices choices = parallel::choose_experts(
      router_logits(tokens),
      {.num_selected = options.num_selected, .normalize_weights = options.normalize_weights});
  const parallel::DispatchPlan plan = parallel::plan_dispatch(
      choices.experts,
      {.num_experts = options.num_experts, .capacity_factor = options.capacity_factor},
      groups_.get());
  const at::Tensor rows =
      parallel::send_to_experts(tokens.index_select(0, plan.tokens), plan, groups_.get());
  const at::Tensor results = parallel::return_to_tokens(
      outputs_of_experts(rows, plan.rows_of_expert), plan, groups_.get());
  // The sum over the experts of a token is computed in the dtype of the weights and rounded once.
  const at::Tensor weights =
      choices.weights.reshape({-1}).index_select(0, plan.choices).unsqueeze(1);
  const at::Tensor sums =
      at::zeros({tokens.size(0), options.features}, weights.options())
          .index_add(0, plan.tokens, results.to(weights.scalar_type()) * weights);
  return {.values = sums.to(results.scalar_type()).view(input.sizes()),
          .losses = losses_of(choices, plan),
          .statistics = {.choices_of_expert = plan.choices_of_expert,
                         .num_tokens = plan.num_tokens,
                         .num_dropped = plan.num_dropped}};
}

at::Tensor MixtureOfExpertsImpl::router_logits(const at::Tensor& tokens) const {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = tokens.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::linear(tokens.to(dtype), router->weight.to(dtype));
}

RouterLosses MixtureOfExpertsImpl::losses_of(const parallel::RouterChoices& choices,
                                             const parallel::DispatchPlan& plan) const {
  // Shape (num_experts + 1): for each expert the sum of its probabilities over the tokens, then the
  // sum of the squared log-sum-exp of the logits.
  at::Tensor sums =
      at::cat({choices.probabilities.sum(0), choices.log_sums.square().sum(0, /*keepdim=*/true)});
  if (groups_) sums = functional::reduce_from_group(sums, groups_->tokens);
  const auto num_tokens = static_cast<double>(std::max<int64_t>(plan.num_tokens, 1));
  const at::Tensor shares = plan.choices_beside_tokens.to(sums.scalar_type()) /
                            (num_tokens * static_cast<double>(options.num_selected));
  const at::Tensor means = sums / num_tokens;
  return {.load_balance = (means.narrow(0, 0, options.num_experts) * shares).sum() *
                          static_cast<double>(options.num_experts),
          .z = means.select(0, options.num_experts)};
}

// An expert without rows is computed, too, so that its parameters get gradients (zeros) on every
// rank.
at::Tensor MixtureOfExpertsImpl::outputs_of_experts(const at::Tensor& rows,
                                                    const std::vector<int64_t>& sizes) const {
  const std::vector<at::Tensor> parts = rows.split_with_sizes(sizes);
  const std::vector<at::Tensor> up = by_expert(up_weight, sizes.size());
  const std::vector<at::Tensor> up_biases = by_expert(up_bias, sizes.size());
  const std::vector<at::Tensor> down = by_expert(down_weight, sizes.size());
  const std::vector<at::Tensor> down_biases = by_expert(down_bias, sizes.size());
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const at::Tensor hidden = activated(linear(parts[i], up[i], up_biases[i]), options.activation);
    outputs.push_back(linear(hidden, down[i], down_biases[i]));
  }
  return at::cat(outputs);
}

std::vector<std::string> MixtureOfExpertsImpl::names_of_expert_parameters() const {
  if (!options.bias) return {"up_weight", "down_weight"};
  return {"up_weight", "up_bias", "down_weight", "down_bias"};
}

void MixtureOfExpertsImpl::divide(std::shared_ptr<const parallel::ExpertGroups> groups,
                                  const std::string& name) {
  const int num_ranks = groups->experts.world_size();
  const int rank = groups->experts.rank();
  const int64_t num_own = options.num_experts / num_ranks;
  const at::NoGradGuard no_grad;
  auto parameters = named_parameters(/*recurse=*/false);
  for (const std::string& parameter : names_of_expert_parameters()) {
    if (num_ranks == 1) break;
    at::Tensor tensor = parameters[parameter];
    tensor.set_data(tensor.detach().narrow(0, rank * num_own, num_own).clone());
    wrap::mark_as_shard(tensor,
                        {.parameter = name.empty() ? parameter : format("{}.{}", name, parameter),
                         .owner = "divided by ExpertParallel",
                         .rank = rank,
                         .num_ranks = num_ranks,
                         .has_joint_loss = true});
  }
  groups_ = std::move(groups);
}

}  // namespace cadre
