#include "cadre/train/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cadre/base/error.h"
#include "cadre/train/schedule.h"

namespace cadre::train {
namespace {

constexpr double kTolerance = 1e-6;

// A matrix, a transposed one, a vector and one that often has no gradient.
NamedTensors make_parameters() {
  torch::manual_seed(1);
  NamedTensors parameters = {{"w", torch::randn({5, 3})},
                             {"t", torch::randn({4, 6}).t()},
                             {"b", torch::randn({7})},
                             {"rare", torch::randn({2, 2})}};
  for (auto& [name, tensor] : parameters) tensor.requires_grad_(true);
  return parameters;
}

NamedTensors clones(const NamedTensors& parameters) {
  NamedTensors copies;
  for (const auto& [name, tensor] : parameters) {
    copies.emplace_back(name, tensor.detach().clone().requires_grad_(true));
  }
  return copies;
}

// The same gradients for both; each contiguous, so that the transposed parameter's has other
// strides; "rare" has one in every third step only.
void set_gradients(const NamedTensors& a, const NamedTensors& b, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor gradient = torch::randn(a[i].second.sizes());
    const bool has_one = a[i].first != "rare" || step % 3 == 1;
    a[i].second.mutable_grad() = has_one ? gradient : at::Tensor();
    b[i].second.mutable_grad() = has_one ? gradient.clone() : at::Tensor();
  }
}

// Two groups, because decay counts for matrices only.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const NamedTensors& parameters,
                                                         Options options, double decay) {
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const auto& [name, tensor] : parameters) {
    (tensor.dim() >= 2 ? matrices : others).push_back(tensor);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<Options>(Options(options).weight_decay(decay)));
  groups.emplace_back(others, std::make_unique<Options>(Options(options).weight_decay(0)));
  return groups;
}

void expect_equal_steps(const NamedTensors& own, Optimizer& optimizer, const NamedTensors& truth,
                        torch::optim::Optimizer& oracle, double learning_rate) {
  for (int step = 0; step < 20; ++step) {
    set_gradients(own, truth, step);
    optimizer.step(learning_rate);
    oracle.step();
    for (size_t i = 0; i < own.size(); ++i) {
      const double scale = truth[i].second.abs().max().item<double>();
      const double error = (own[i].second - truth[i].second).abs().max().item<double>();
      EXPECT_LE(error, kTolerance * scale) << own[i].first << " in step " << step;
    }
  }
}

TEST(Optimizer, AdamWIsTorchs) {
  const NamedTensors own = make_parameters();
  const NamedTensors truth = clones(own);
  const OptimizerConfig config;
  const auto optimizer = make_optimizer(own, config);
  const double rate = 0.01;
  torch::optim::AdamW oracle(groups_of(
      truth,
      torch::optim::AdamWOptions(rate).betas({config.beta1, config.beta2}).eps(config.epsilon),
      config.weight_decay));
  expect_equal_steps(own, *optimizer, truth, oracle, rate);
}

struct SgdCase {
  double momentum;
  bool nesterov;
};

class SgdTest : public ::testing::TestWithParam<SgdCase> {};

TEST_P(SgdTest, SgdIsTorchs) {
  const NamedTensors own = make_parameters();
  const NamedTensors truth = clones(own);
  OptimizerConfig config;
  config.kind = "sgd";
  config.momentum = GetParam().momentum;
  config.nesterov = GetParam().nesterov;
  const auto optimizer = make_optimizer(own, config);
  const double rate = 0.05;
  const auto options =
      torch::optim::SGDOptions(rate).momentum(config.momentum).nesterov(config.nesterov);
  torch::optim::SGD oracle(groups_of(truth, options, config.weight_decay), options);
  expect_equal_steps(own, *optimizer, truth, oracle, rate);
}

INSTANTIATE_TEST_SUITE_P(All, SgdTest,
                         ::testing::Values(SgdCase{0, false}, SgdCase{0.9, false},
                                           SgdCase{0.9, true}));

TEST(Optimizer, StateGoesOnWhereItStopped) {
  for (const std::string kind : {"adamw", "sgd"}) {
    OptimizerConfig config;
    config.kind = kind;
    const NamedTensors straight = make_parameters();
    const auto whole = make_optimizer(straight, config);
    for (int step = 0; step < 3; ++step) {
      set_gradients(straight, straight, step);
      whole->step(0.01);
    }
    const NamedTensors copied = clones(straight);
    NamedTensors state;
    for (const auto& [name, tensor] : whole->state()) state.emplace_back(name, tensor.clone());
    const auto resumed = make_optimizer(copied, config);
    resumed->load_state(state);
    for (int step = 3; step < 8; ++step) {
      set_gradients(straight, copied, step);
      whole->step(0.01);
      resumed->step(0.01);
    }
    for (size_t i = 0; i < copied.size(); ++i) {
      EXPECT_TRUE(copied[i].second.equal(straight[i].second)) << kind << " " << copied[i].first;
    }
  }
}

TEST(Optimizer, RefusesStateThatDoesNotFit) {
  const auto message = [](const NamedTensors& state) {
    try {
      make_optimizer(make_parameters(), {})->load_state(state);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  EXPECT_THAT(message({{"x.exp_avg", torch::zeros(1)}}), ::testing::HasSubstr("x.exp_avg belongs"));
  EXPECT_THAT(message({{"b.exp_avg", torch::zeros(1)}}), ::testing::HasSubstr("shape and dtype"));
  EXPECT_THAT(message({{"b.exp_avg", torch::zeros(7)}}), ::testing::HasSubstr("incomplete"));
}

TEST(Optimizer, SeesWhatTheKernelsWouldGetWrong) {
  const at::Tensor weight = torch::ones({2}, torch::kFloat64).requires_grad_(true);
  const auto optimizer = make_optimizer({{"w", weight}}, {});
  // A graph that needs the old value must notice that it is gone.
  const at::Tensor squared = (weight * weight).sum();
  weight.mutable_grad() = torch::ones({2}, torch::kFloat64);
  const auto version = weight._version();
  optimizer->step(0.1);
  EXPECT_GT(weight._version(), version);
  EXPECT_THROW(squared.backward(), c10::Error);

  weight.set_grad_dtype(torch::kFloat32);
  weight.mutable_grad() = torch::ones({2}, torch::kFloat32);
  EXPECT_THROW(optimizer->step(0.1), Error);
}

TEST(ClipGradientNorm, IsTorchs) {
  const NamedTensors own = make_parameters();
  const NamedTensors truth = clones(own);
  set_gradients(own, truth, 1);
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : truth) tensors.push_back(tensor);
  const double expected = torch::nn::utils::clip_grad_norm_(tensors, 0.5);
  EXPECT_NEAR(clip_gradient_norm(own, 0.5), expected, 1e-5);
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_TRUE(own[i].second.grad().allclose(truth[i].second.grad(), 1e-5, 1e-7));
  }
  EXPECT_NEAR(clip_gradient_norm(own, 0), 0.5, 1e-4) << "0 is no limit";
}

TEST(Schedule, WarmsUpThenFallsAlongACosine) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 1.0;
  ScheduleConfig schedule;
  schedule.warmup_steps = 10;
  schedule.final_fraction = 0.2;
  const auto rate = [&](int64_t step) { return learning_rate_at(step, 110, optimizer, schedule); };
  EXPECT_DOUBLE_EQ(rate(1), 0.1);
  EXPECT_DOUBLE_EQ(rate(10), 1.0);
  EXPECT_DOUBLE_EQ(rate(60), 0.6);
  EXPECT_DOUBLE_EQ(rate(110), 0.2);
  schedule.kind = "constant";
  EXPECT_DOUBLE_EQ(rate(110), 1.0);
}

}  // namespace
}  // namespace cadre::train
