// Compares the layer, in one process and divided among ranks, with its definition, computed in one
// process in float64: the output, the auxiliary losses, and the gradients of the input, the router
// and the experts.
//
// Bounds, as fractions of a tensor's largest value. float64: 1e-12. Every number is a chain of
// about ten sums of at most 100 terms, which are added in another order. So it differs by about 10
// * 100 * 2^-53 = 1e-13 of the sums of absolute values, which are at most about ten times the
// largest value. float32: 5e-4, by the same argument with 2^-24. bfloat16: 5e-2. An output or a
// gradient has about ten roundings of 2^-9 of numbers that are at most twice the largest value. The
// selected experts are the same, because logits, which are never bfloat16, differ from each other
// by more than the rounding errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <vector>

#include "cadre/parallel/ep/expert_parallel.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/ep_models.h"
#include "cadre/testing/torch/ep_reference.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::Degrees;
using testing::error_of;
using testing::ExpertReference;
using testing::ExpertWeights;
using ::testing::HasSubstr;
using testing::reference_of;
using testing::require;
using testing::run_groups;
using testing::smooth_numbers;
using torch::Tensor;

constexpr int64_t kFeatures = 6;
constexpr int64_t kHidden = 5;
constexpr int64_t kExperts = 12;  // divisible by 1, 2, 3 and 4 ranks
constexpr int64_t kTokens = 22;

enum class Traffic { kMixed, kIdleExpert, kOneExpert, kIdleRank };

struct Problem {
  MixtureOfExpertsOptions options;
  Traffic traffic;
  torch::ScalarType dtype;

  std::string name() const {
    return "traffic " + std::to_string(static_cast<int>(traffic)) + ", " +
           std::to_string(options.num_selected) + " of " + std::to_string(kExperts) +
           " experts, capacity_factor " +
           (options.capacity_factor ? std::to_string(*options.capacity_factor) : "not given") +
           ", " + c10::toString(dtype);
  }
};

std::vector<Problem> all_problems() {
  std::vector<Problem> problems;
  for (const auto traffic :
       {Traffic::kMixed, Traffic::kIdleExpert, Traffic::kOneExpert, Traffic::kIdleRank}) {
    for (const int64_t num_selected : {1, 2}) {
      for (const std::optional<double> factor : {std::optional<double>(), {1.3}, {0.4}}) {
        for (const auto dtype : {torch::kDouble, torch::kFloat}) {
          problems.push_back({{.features = kFeatures,
                               .hidden_features = kHidden,
                               .num_experts = kExperts,
                               .num_selected = num_selected,
                               .normalize_weights = num_selected > 1,
                               .capacity_factor = factor},
                              traffic,
                              dtype});
        }
      }
    }
  }
  return problems;
}

// Returns weights whose values can be represented in the problem's dtype.
ExpertWeights weights_of(const Problem& problem) {
  ExpertWeights weights{.router = smooth_numbers({kExperts, kFeatures}, 1) * 2,
                        .up_weight = smooth_numbers({kExperts, kHidden, kFeatures}, 2),
                        .up_bias = smooth_numbers({kExperts, kHidden}, 3),
                        .down_weight = smooth_numbers({kExperts, kFeatures, kHidden}, 4),
                        .down_bias = smooth_numbers({kExperts, kFeatures}, 5)};
  // The first feature of every token is 1, so this column of the router's weight adds a constant to
  // each expert's logits.
  weights.router.select(1, 0).zero_();
  if (problem.traffic == Traffic::kIdleExpert) weights.router[3][0] = -9;
  if (problem.traffic == Traffic::kOneExpert) weights.router[5][0] = 7;
  for (Tensor* tensor : {&weights.router, &weights.up_weight, &weights.up_bias,
                         &weights.down_weight, &weights.down_bias}) {
    *tensor = tensor->to(problem.dtype).to(torch::kDouble).requires_grad_(true);
  }
  return weights;
}

Tensor tokens_of(const Problem& problem) {
  Tensor x = torch::sin(torch::arange(kTokens * kFeatures, torch::kDouble).square() * 0.37)
                 .view({kTokens, kFeatures})
                 .contiguous();
  x.select(1, 0).fill_(1);
  return x.to(problem.dtype).to(torch::kDouble).clone().requires_grad_(true);
}

// The tokens of a rank. Ranks have unequal numbers of tokens. If `has_idle` is set and there are
// several ranks, rank 0 has none.
struct Rows {
  int64_t begin;
  int64_t size;
  Tensor of(const Tensor& whole) const { return whole.narrow(0, begin, size); }
};
Rows rows_of(const Problem& problem, const ProcessGroup& group) {
  const bool has_idle = problem.traffic == Traffic::kIdleRank && group.world_size() > 1;
  const int64_t num_ranks = group.world_size() - (has_idle ? 1 : 0);
  const int64_t rank = group.rank() - (has_idle ? 1 : 0);
  if (rank < 0) return {.begin = 0, .size = 0};
  const int64_t begin = kTokens * rank * (rank + 1) / (num_ranks * (num_ranks + 1));
  const int64_t end = kTokens * (rank + 1) * (rank + 2) / (num_ranks * (num_ranks + 1));
  return {.begin = begin, .size = end - begin};
}

void require_close(const Problem& problem, const Tensor& actual, const Tensor& expected,
                   const std::string& what) {
  require(actual.defined() && actual.sizes() == expected.sizes(), problem.name() + ": no " + what);
  if (expected.numel() == 0) return;
  const double bound = problem.dtype == torch::kDouble  ? 1e-12
                       : problem.dtype == torch::kFloat ? 5e-4
                                                        : 5e-2;
  // Differences are measured relative to at least 0.01, because all values of a rank's part may be
  // close to zero, for example gradients of experts that few tokens select.
  const double largest = std::max(expected.abs().max().item<double>(), 0.01);
  const double difference = (actual.to(torch::kDouble) - expected).abs().max().item<double>();
  require(difference <= bound * largest, problem.name() + ": " + what + " differs by " +
                                             std::to_string(difference / largest / bound) +
                                             " of its bound");
}

struct Expected {
  ExpertReference reference;
  std::vector<Tensor> gradients;  // those of the tokens, the router and the experts
};

Tensor weights_of_loss() {
  return smooth_numbers({kTokens, kFeatures}, 6);
}
constexpr RouterLossWeights kLossWeights{.load_balance = 0.7, .z = 0.3};

Expected expected_of(const Problem& problem) {
  const ExpertWeights weights = weights_of(problem);
  const Tensor x = tokens_of(problem);
  Expected expected{.reference = reference_of(weights, x, problem.options), .gradients = {}};
  const Tensor loss = (expected.reference.values * weights_of_loss()).sum() +
                      expected.reference.load_balance * kLossWeights.load_balance +
                      expected.reference.z * kLossWeights.z;
  loss.backward();
  expected.gradients.push_back(x.grad());
  for (const Tensor& weight : weights.all()) {
    expected.gradients.push_back(weight.grad().defined() ? weight.grad()
                                                         : torch::zeros_like(weight));
  }
  return expected;
}

// Makes the layer. On rank 0 it has the weights of the problem, on other ranks different weights.
MixtureOfExperts layer_of(const Problem& problem, int rank) {
  MixtureOfExperts layer(problem.options);
  layer->to(problem.dtype);
  const torch::NoGradGuard no_grad;
  const std::vector<Tensor> weights = weights_of(problem).all();
  const std::vector<Tensor> parameters = {layer->router->weight, layer->up_weight, layer->up_bias,
                                          layer->down_weight, layer->down_bias};
  for (size_t i = 0; i < weights.size(); ++i) parameters[i].copy_(weights[i] * (1 + rank));
  return layer;
}

void require_equal_to_one_process(const Problem& problem, const Expected& expected,
                                  const ProcessGroup& group, const DeviceMesh& mesh) {
  MixtureOfExperts layer = layer_of(problem, group.rank());
  const ExpertParallel experts(*layer, mesh);
  const Rows rows = rows_of(problem, group);
  const Tensor x = rows.of(tokens_of(problem)).detach().to(problem.dtype).requires_grad_(true);
  const auto output = layer->forward(x);
  require_close(problem, output.values.detach(), rows.of(expected.reference.values).detach(),
                "output");
  require_close(problem, output.losses.load_balance.detach(),
                expected.reference.load_balance.detach(), "load_balance");
  require_close(problem, output.losses.z.detach(), expected.reference.z.detach(), "z");
  require(output.statistics.num_tokens == kTokens, "num_tokens");
  require(output.statistics.num_dropped == expected.reference.num_dropped,
          problem.name() + ": num_dropped " + std::to_string(output.statistics.num_dropped));
  require(torch::equal(output.statistics.choices_of_expert,
                       torch::tensor(expected.reference.choices_of_expert)),
          "choices_of_expert");
  const Tensor weights = rows.of(weights_of_loss()).to(problem.dtype);
  ((output.values * weights).sum() + output.losses.weighted(kLossWeights)).backward();
  experts.sum_gradients();
  require_close(problem, x.grad(), rows.of(expected.gradients[0]), "gradient of the input");
  const std::vector<Tensor> parameters = {layer->router->weight, layer->up_weight, layer->up_bias,
                                          layer->down_weight, layer->down_bias};
  const int64_t num_own = kExperts / mesh.size("ep");
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor whole = expected.gradients[i + 1];
    const Tensor part = i == 0 ? whole : whole.narrow(0, mesh.coordinate("ep") * num_own, num_own);
    require_close(problem, parameters[i].grad(), part, "gradient " + std::to_string(i));
  }
}

class MixtureOfExpertsOnRanks : public ::testing::TestWithParam<Degrees> {};

TEST_P(MixtureOfExpertsOnRanks, EqualsItsDefinitionInOneProcess) {
  const auto [dp, ep] = GetParam();
  const std::vector<Problem> problems = all_problems();
  std::vector<Expected> expected;
  int64_t num_dropped = 0;
  for (const Problem& problem : problems) {
    expected.push_back(expected_of(problem));
    EXPECT_GT(expected.back().reference.smallest_gap, 1e-4) << problem.name();
    num_dropped += expected.back().reference.num_dropped;
  }
  EXPECT_GT(num_dropped, 0);
  const auto result = run_groups(dp * ep, [&, dp = dp, ep = ep](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"dp", dp}, {"ep", ep}});
    for (size_t i = 0; i < problems.size(); ++i) {
      require_equal_to_one_process(problems[i], expected[i], group, mesh);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(Ranks, MixtureOfExpertsOnRanks,
                         ::testing::Values(Degrees{1, 1}, Degrees{1, 2}, Degrees{1, 3},
                                           Degrees{1, 4}, Degrees{2, 1}, Degrees{2, 2}),
                         [](const auto& test) {
                           return "dp" + std::to_string(test.param.dp) + "_ep" +
                                  std::to_string(test.param.ep);
                         });

// Computed by hand: 4 tokens, 2 experts, capacity ceil(0.75 * 4 * 2 / 2) = 3. All four tokens
// select expert 0 first and expert 1 second, so each expert drops the last token.
TEST(MixtureOfExperts, DropsTheLastChoicesBeyondTheCapacity) {
  MixtureOfExperts layer(MixtureOfExpertsOptions{
      .features = 2, .hidden_features = 3, .num_experts = 2, .capacity_factor = 0.75});
  const torch::NoGradGuard no_grad;
  layer->router->weight.copy_(torch::tensor({{1.0, 0.0}, {0.0, 0.0}}));
  const auto output = layer(torch::ones({4, 2}));
  EXPECT_EQ(output.statistics.num_dropped, 2);
  EXPECT_TRUE(torch::equal(output.values[3], torch::zeros({2})));
  EXPECT_FALSE(torch::equal(output.values[2], torch::zeros({2})));
}

// The first choice of a later token has priority over the second choice of an earlier one. The
// capacity is ceil(0.5 * 2 * 2 / 2) = 1: token 0 prefers expert 0, and token 1 prefers expert 1.
TEST(MixtureOfExperts, FirstChoicesComeBeforeSecondOnes) {
  MixtureOfExperts layer(MixtureOfExpertsOptions{
      .features = 2, .hidden_features = 3, .num_experts = 2, .capacity_factor = 0.5});
  const torch::NoGradGuard no_grad;
  layer->router->weight.copy_(torch::eye(2));
  const Tensor weight = torch::tensor(1 / (1 + std::exp(-1.0)), torch::kFloat);
  const auto output = layer(torch::eye(2));
  EXPECT_EQ(output.statistics.num_dropped, 2);
  for (int64_t i = 0; i < 2; ++i) {
    const Tensor expected = layer->down_weight[i].mv(torch::gelu(
                                layer->up_weight[i].mv(torch::eye(2)[i]) + layer->up_bias[i])) +
                            layer->down_bias[i];
    EXPECT_TRUE(torch::allclose(output.values[i], expected * weight, 1e-5, 1e-6)) << i;
  }
}

// If all experts are equally probable, the load-balance loss is 1, whatever the router selects.
TEST(MixtureOfExperts, ABalancedRouterHasTheLossOne) {
  MixtureOfExperts layer(
      MixtureOfExpertsOptions{.features = 2, .hidden_features = 3, .num_experts = 4});
  const torch::NoGradGuard no_grad;
  layer->router->weight.zero_();
  RouterLosses losses;
  losses += layer(torch::ones({5, 2})).losses;
  losses += layer(torch::ones({5, 2})).losses;
  EXPECT_NEAR(losses.load_balance.item<double>(), 2, 1e-6);
  EXPECT_NEAR(losses.z.item<double>(), 2 * std::log(4.0) * std::log(4.0), 1e-5);
}

TEST(MixtureOfExperts, AutocastLeavesTheRouterInFloat32) {
  MixtureOfExperts layer(
      MixtureOfExpertsOptions{.features = 4, .hidden_features = 3, .num_experts = 4});
  const Tensor x = smooth_numbers({2, 5, 4}, 1).to(torch::kFloat);
  const auto plain = layer(x);
  {
    const Autocast autocast(torch::kBFloat16);
    const auto output = layer(x);
    EXPECT_EQ(output.values.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(output.values.sizes(), x.sizes());
    EXPECT_TRUE(torch::equal(output.losses.load_balance, plain.losses.load_balance));
    EXPECT_TRUE(torch::allclose(output.values.to(torch::kFloat), plain.values, 0.05, 0.02));
    (output.values.sum() + output.losses.weighted(kLossWeights)).backward();
  }
  EXPECT_EQ(layer->router->weight.grad().scalar_type(), torch::kFloat);
  EXPECT_EQ(layer->up_weight.grad().sizes(), layer->up_weight.sizes());
}

// A capacity factor so large that the capacity does not fit into an integer drops nothing.
TEST(MixtureOfExperts, ALargeCapacityDropsNothing) {
  MixtureOfExpertsOptions options{.features = 6, .hidden_features = 3, .num_experts = 4};
  torch::manual_seed(1);
  MixtureOfExperts unlimited(options);
  options.capacity_factor = 1e300;
  torch::manual_seed(1);
  MixtureOfExperts limited(options);
  const Tensor x = smooth_numbers({9, 6}, 1).to(torch::kFloat);
  const auto output = limited(x);
  EXPECT_EQ(output.statistics.num_dropped, 0);
  EXPECT_TRUE(torch::equal(output.values, unlimited(x).values));
}

TEST(MixtureOfExperts, NoTokenOnAnyRankGivesZeros) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    MixtureOfExperts layer(MixtureOfExpertsOptions{
        .features = 4, .hidden_features = 3, .num_experts = 4, .capacity_factor = 1.0});
    const ExpertParallel experts(*layer, DeviceMesh(group, {{"ep", 2}}));
    const auto output = layer(torch::zeros({0, 5, 4}));
    require(output.values.sizes() == at::IntArrayRef({0, 5, 4}), "sizes of the output");
    require(output.statistics.num_tokens == 0 && output.statistics.num_dropped == 0, "statistics");
    require(output.losses.load_balance.item<double>() == 0, "load_balance");
    require(output.losses.z.item<double>() == 0, "z");
    (output.values.sum() + output.losses.weighted(kLossWeights)).backward();
    experts.sum_gradients();
    for (const auto& parameter : layer->named_parameters()) {
      const Tensor& gradient = parameter.value().grad();
      require(gradient.defined() && gradient.eq(0).all().item<bool>(), parameter.key());
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MixtureOfExperts, EqualsItsDefinitionInBfloat16) {
  const Problem problem{
      {.features = kFeatures, .hidden_features = kHidden, .num_experts = kExperts},
      Traffic::kMixed,
      torch::kBFloat16};
  const Expected expected = expected_of(problem);
  // The gap must exceed the router's rounding errors, which are below 1e-6 because it computes in
  // float32.
  EXPECT_GT(expected.reference.smallest_gap, 1e-5);
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"ep", 2}});
    require_equal_to_one_process(problem, expected, group, mesh);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MixtureOfExperts, RefusesOptionsAndSizes) {
  const auto refusal = [](const MixtureOfExpertsOptions& options) {
    return error_of([&] { MixtureOfExperts layer(options); }, ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(refusal({.features = 4, .hidden_features = 0, .num_experts = 2}),
              HasSubstr("features 4, hidden_features 0 and num_experts 2 must be at least 1"));
  EXPECT_THAT(refusal({.features = 4, .hidden_features = 4, .num_experts = 2, .num_selected = 3}),
              HasSubstr("num_selected is 3, expected 1 to 2, the number of experts"));
  EXPECT_THAT(refusal({.features = 4, .hidden_features = 4, .num_experts = 2, .num_selected = 1}),
              HasSubstr("set normalize_weights = false, or num_selected to 2 or more"));
  EXPECT_THAT(
      refusal({.features = 4, .hidden_features = 4, .num_experts = 2, .capacity_factor = 0}),
      HasSubstr("capacity_factor is 0, expected a number larger than 0"));
  MixtureOfExperts layer(
      MixtureOfExpertsOptions{.features = 4, .hidden_features = 3, .num_experts = 2});
  EXPECT_THAT(error_of(
                  [&] {
                    static_cast<void>(layer(torch::ones({2, 3})));
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("the input has the sizes (2, 3), but the last one must be the 4 features"));
  const auto refusal_of = [&](const Tensor& input) {
    return error_of([&] { static_cast<void>(layer(input)); }, ErrorCode::kInvalidArgument);
  };
  EXPECT_THAT(
      refusal_of(torch::empty({2, 4}, torch::kMeta)),
      HasSubstr("the input is Float on meta, expected a floating-point tensor with values"));
  EXPECT_THAT(refusal_of(torch::ones({2, 4}, torch::kLong)),
              HasSubstr("the input is Long on cpu, expected a floating-point tensor with values"));
}

}  // namespace
}  // namespace cadre
