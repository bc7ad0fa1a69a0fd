#include "cadre/train/trainer/strategy/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cadre/core/base/error.h"
#include "cadre/train/trainer/config/schedule.h"

namespace cadre::train {
namespace {

constexpr double kTolerance = 1e-6;

// A matrix, a transposed one, a vector and one that often has no gradient.
std::vector<NamedTensor> make_parameters() {
  torch::manual_seed(1);
  std::vector<NamedTensor> parameters = {{"w", torch::randn({5, 3})},
                                         {"t", torch::randn({4, 6}).t()},
                                         {"b", torch::randn({7})},
                                         {"rare", torch::randn({2, 2})}};
  for (auto& [name, tensor] : parameters) tensor.requires_grad_(true);
  return parameters;
}

std::vector<NamedTensor> clones(const std::vector<NamedTensor>& parameters) {
  std::vector<NamedTensor> copies;
  for (const auto& [name, tensor] : parameters) {
    copies.emplace_back(name, tensor.detach().clone().requires_grad_(true));
  }
  return copies;
}

// The same gradients for both; each contiguous, so that the transposed parameter's has other
// strides; "rare" has one in every third step only.
void set_gradients(const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor gradient = torch::randn(a[i].tensor.sizes());
    const bool has_one = a[i].name != "rare" || step % 3 == 1;
    a[i].tensor.mutable_grad() = has_one ? gradient : at::Tensor();
    b[i].tensor.mutable_grad() = has_one ? gradient.clone() : at::Tensor();
  }
}

// Two groups, because decay applies to matrices only.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const std::vector<NamedTensor>& parameters,
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

void expect_equal_steps(const std::vector<NamedTensor>& own, Optimizer& optimizer,
                        const std::vector<NamedTensor>& truth, torch::optim::Optimizer& oracle,
                        double learning_rate) {
  for (int step = 0; step < 20; ++step) {
    set_gradients(own, truth, step);
    optimizer.step(learning_rate);
    oracle.step();
    for (size_t i = 0; i < own.size(); ++i) {
      const double scale = truth[i].tensor.abs().max().item<double>();
      const double error = (own[i].tensor - truth[i].tensor).abs().max().item<double>();
      EXPECT_LE(error, kTolerance * scale) << own[i].name << " in step " << step;
    }
  }
}

TEST(Optimizer, AdamWIsTorchs) {
  const std::vector<NamedTensor> own = make_parameters();
  const std::vector<NamedTensor> truth = clones(own);
  const OptimizerConfig config;
  const auto optimizer = make_optimizer(trained_tensors(own), config);
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
  const std::vector<NamedTensor> own = make_parameters();
  const std::vector<NamedTensor> truth = clones(own);
  OptimizerConfig config;
  config.kind = "sgd";
  config.momentum = GetParam().momentum;
  config.nesterov = GetParam().nesterov;
  const auto optimizer = make_optimizer(trained_tensors(own), config);
  const double rate = 0.05;
  const auto options =
      torch::optim::SGDOptions(rate).momentum(config.momentum).nesterov(config.nesterov);
  torch::optim::SGD oracle(groups_of(truth, options, config.weight_decay), options);
  expect_equal_steps(own, *optimizer, truth, oracle, rate);
}

INSTANTIATE_TEST_SUITE_P(All, SgdTest,
                         ::testing::Values(SgdCase{0, false}, SgdCase{0.9, false},
                                           SgdCase{0.9, true}));

template <typename Oracle, typename Options>
void expect_torchs(const OptimizerConfig& config, const Options& options) {
  const std::vector<NamedTensor> own = make_parameters();
  const std::vector<NamedTensor> truth = clones(own);
  const auto optimizer = make_optimizer(trained_tensors(own), config);
  Oracle oracle(groups_of(truth, options, config.weight_decay));
  expect_equal_steps(own, *optimizer, truth, oracle, config.learning_rate);
}

TEST(Optimizer, AdamIsTorchs) {
  OptimizerConfig config = default_optimizer("adam");
  for (const double decay : {0.0, 0.1}) {
    config.weight_decay = decay;
    expect_torchs<torch::optim::Adam>(config, torch::optim::AdamOptions(config.learning_rate));
  }
}

TEST(Optimizer, AdagradIsTorchs) {
  OptimizerConfig config = default_optimizer("adagrad");
  for (const double decay : {0.0, 0.1}) {
    config.weight_decay = decay;
    config.rate_decay = decay / 2;
    expect_torchs<torch::optim::Adagrad>(
        config, torch::optim::AdagradOptions(config.learning_rate).lr_decay(config.rate_decay));
  }
}

TEST(Optimizer, RmsPropIsTorchs) {
  OptimizerConfig config = default_optimizer("rmsprop");
  for (const double momentum : {0.0, 0.7}) {
    config.momentum = momentum;
    config.weight_decay = momentum / 10;
    expect_torchs<torch::optim::RMSprop>(
        config, torch::optim::RMSpropOptions(config.learning_rate).momentum(momentum));
  }
}

// libtorch has none: the formula of torch.optim.Adadelta, in double, one number at a time.
TEST(Optimizer, AdadeltaIsTheFormula) {
  OptimizerConfig config = default_optimizer("adadelta");
  config.rho = 0.8;
  config.weight_decay = 0.05;
  const std::vector<NamedTensor> own = make_parameters();
  const std::vector<NamedTensor> truth = clones(own);
  const auto optimizer = make_optimizer(trained_tensors(own), config);
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> state;
  std::map<std::string, at::Tensor> expected;
  for (const auto& [name, tensor] : truth) {
    expected[name] = tensor.detach().to(torch::kFloat64);
    state[name] = {torch::zeros_like(expected[name]), torch::zeros_like(expected[name])};
  }
  for (int step = 0; step < 20; ++step) {
    set_gradients(own, truth, step);
    optimizer->step(0.5);
    for (const auto& [name, tensor] : truth) {
      if (!tensor.grad().defined()) continue;
      at::Tensor& x = expected[name];
      auto& [square, accumulated] = state[name];
      const at::Tensor gradient =
          tensor.grad().to(torch::kFloat64) + (tensor.dim() >= 2 ? 0.05 : 0.0) * x;
      square = 0.8 * square + 0.2 * gradient * gradient;
      const at::Tensor delta = (accumulated + 1e-6).sqrt() / (square + 1e-6).sqrt() * gradient;
      accumulated = 0.8 * accumulated + 0.2 * delta * delta;
      x = x - 0.5 * delta;
    }
    for (const auto& [name, tensor] : own) {
      EXPECT_TRUE(tensor.detach().to(torch::kFloat64).allclose(expected[name], 1e-5, 1e-6))
          << name << " in step " << step;
    }
  }
}

TEST(Optimizer, StateGoesOnWhereItStopped) {
  for (const std::string kind : {"adamw", "adam", "sgd", "adagrad", "rmsprop", "adadelta"}) {
    OptimizerConfig config = default_optimizer(kind);
    config.momentum = 0.9;
    const std::vector<NamedTensor> straight = make_parameters();
    const auto whole = make_optimizer(trained_tensors(straight), config);
    for (int step = 0; step < 3; ++step) {
      set_gradients(straight, straight, step);
      whole->step(0.01);
    }
    const std::vector<NamedTensor> copied = clones(straight);
    std::vector<NamedTensor> state;
    for (const auto& [name, tensor] : whole->state()) state.emplace_back(name, tensor.clone());
    const auto resumed = make_optimizer(trained_tensors(copied), config);
    resumed->load_state(state);
    for (int step = 3; step < 8; ++step) {
      set_gradients(straight, copied, step);
      whole->step(0.01);
      resumed->step(0.01);
    }
    for (size_t i = 0; i < copied.size(); ++i) {
      EXPECT_TRUE(copied[i].tensor.equal(straight[i].tensor)) << kind << " " << copied[i].name;
    }
  }
}

TEST(Optimizer, RefusesStateThatDoesNotFit) {
  const auto message = [](const std::vector<NamedTensor>& state) {
    try {
      make_optimizer(trained_tensors(make_parameters()), {})->load_state(state);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << "settings differ, no bytes";
      return error.message();
    }
    return std::string();
  };
  EXPECT_THAT(message({{"x.exp_avg", torch::zeros(1)}}),
              ::testing::HasSubstr("x.exp_avg: this optimizer has no such parameter or state"));
  EXPECT_THAT(message({{"b.exp_avg", torch::zeros(1)}}), ::testing::HasSubstr("shape and dtype"));
  EXPECT_THAT(message({{"b.exp_avg", torch::zeros(7)}}),
              ::testing::HasSubstr("b.exp_avg_sq, which this optimizer needs, is not in the "
                                   "snapshot"));
}

TEST(Optimizer, SeesWhatTheKernelsWouldGetWrong) {
  const at::Tensor weight = torch::ones({2}, torch::kFloat64).requires_grad_(true);
  const auto optimizer = make_optimizer({{"w", weight, true}}, {});
  // Autograd must detect that a graph needs the overwritten value.
  const at::Tensor squared = (weight * weight).sum();
  weight.mutable_grad() = torch::ones({2}, torch::kFloat64);
  const auto version = weight._version();
  optimizer->step(0.1);
  EXPECT_GT(weight._version(), version);
  EXPECT_THROW(squared.backward(), c10::Error);

  weight.set_grad_dtype(torch::kFloat32);
  weight.mutable_grad() = torch::ones({2}, torch::kFloat32);
  EXPECT_THROW(optimizer->step(0.1), Error);

  // SGD's kernel would not change it.
  const at::Tensor half = torch::ones({64}, torch::kBFloat16).requires_grad_(true);
  half.mutable_grad() = torch::ones({64}, torch::kBFloat16);
  try {
    make_optimizer({{"h", half}}, default_optimizer("sgd"))->step(0.1);
    ADD_FAILURE() << "bfloat16 was taken";
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("parameter 0 (h) is dense BFloat16 (64)"));
  }
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

TEST(Schedule, TheDefaultWarmUpFitsTheNumberOfSteps) {
  EXPECT_EQ(resolved_warmup_steps({}, 3), 0);
  EXPECT_EQ(resolved_warmup_steps({}, 200), 20);
  EXPECT_EQ(resolved_warmup_steps({}, 100'000), 50);
  EXPECT_EQ(resolved_warmup_steps({.warmup_steps = 7}, 3), 7) << "as it was set";
}

// torch.optim.lr_scheduler.StepLR, stepped once behind each update.
TEST(Schedule, FallsInSteps) {
  OptimizerConfig optimizer;
  optimizer.learning_rate = 0.8;
  ScheduleConfig schedule{.kind = "step", .warmup_steps = 0, .step_size = 4, .gamma = 0.7};
  double expected = 0.8;
  for (int64_t step = 1; step <= 30; ++step) {
    EXPECT_NEAR(learning_rate_at(step, 30, optimizer, schedule), expected, 1e-15) << step;
    if (step % 4 == 0) expected *= 0.7;
  }
  schedule.warmup_steps = 2;
  EXPECT_DOUBLE_EQ(learning_rate_at(1, 30, optimizer, schedule), 0.4);
}

}  // namespace
}  // namespace cadre::train
