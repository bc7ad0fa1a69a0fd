// Compares the optimizers of configurations with those of torch::optim, with the same options and
// with weight decay of matrices only.
#include "cadre/train/trainer/strategy/optimizer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace cadre::train {
namespace {

constexpr double kTolerance = 1e-6;

// Returns a matrix, a transposed matrix, a vector, and a parameter that often has no gradient.
std::vector<NamedTensor> make_parameters() {
  torch::manual_seed(1);
  std::vector<NamedTensor> parameters = {{"w", torch::randn({5, 3})},
                                         {"t", torch::randn({4, 6}).t()},
                                         {"b", torch::randn({7})},
                                         {"rare", torch::randn({2, 2})}};
  for (NamedTensor& parameter : parameters) parameter.tensor.requires_grad_(true);
  return parameters;
}

// Sets the same gradients in both lists. Gradients are contiguous, so the gradient of the
// transposed parameter has other strides than the parameter. "rare" gets a gradient only in every
// third step.
void set_gradients(const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor gradient = torch::randn(a[i].tensor.sizes());
    const bool has_one = a[i].name != "rare" || step % 3 == 1;
    a[i].tensor.mutable_grad() = has_one ? gradient : at::Tensor();
    b[i].tensor.mutable_grad() = has_one ? gradient.clone() : at::Tensor();
  }
}

template <typename Oracle, typename Options>
void expect_steps_of(const OptimizerConfig& config, const Options& options) {
  const std::vector<NamedTensor> own = make_parameters();
  const std::vector<NamedTensor> truth = make_parameters();
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> others;
  for (const NamedTensor& parameter : truth) {
    (parameter.tensor.dim() >= 2 ? matrices : others).push_back(parameter.tensor);
  }
  // The expected values come from two optimizers instead of two parameter groups: libtorch treats
  // an option of a group as unset if it equals the default of its class.
  Oracle decayed(matrices, Options(options).weight_decay(config.weight_decay));
  Oracle plain(others, Options(options).weight_decay(0));
  const auto optimizer = make_optimizer(own, config);
  for (int step = 0; step < 20; ++step) {
    const double rate = config.learning_rate / (1 + step % 4);
    set_gradients(own, truth, step);
    set_learning_rate(*optimizer, rate);
    set_learning_rate(decayed, rate);
    set_learning_rate(plain, rate);
    optimizer->step();
    decayed.step();
    plain.step();
    for (size_t i = 0; i < own.size(); ++i) {
      const double scale = truth[i].tensor.abs().max().item<double>();
      const double error = (own[i].tensor - truth[i].tensor).abs().max().item<double>();
      EXPECT_LE(error, kTolerance * scale) << own[i].name << " in step " << step;
    }
  }
}

TEST(Optimizer, AdamWIsTorchs) {
  OptimizerConfig config;
  for (const double decay : {0.1, 0.01, 0.0}) {  // 0.01 is the default of torch::optim
    config.weight_decay = decay;
    expect_steps_of<torch::optim::AdamW>(config, torch::optim::AdamWOptions(config.learning_rate)
                                                     .betas({config.beta1, config.beta2})
                                                     .eps(config.epsilon));
  }
}

TEST(Optimizer, AdamIsTorchs) {
  OptimizerConfig config = default_optimizer("adam");
  for (const double decay : {0.0, 0.1}) {
    config.weight_decay = decay;
    expect_steps_of<torch::optim::Adam>(config, torch::optim::AdamOptions(config.learning_rate));
  }
}

TEST(Optimizer, SgdIsTorchs) {
  OptimizerConfig config;
  config.kind = "sgd";
  config.learning_rate = 0.05;
  for (const auto& [momentum, nesterov] : {std::pair(0.0, false), {0.9, false}, {0.9, true}}) {
    config.momentum = momentum;
    config.nesterov = nesterov;
    expect_steps_of<torch::optim::SGD>(
        config, torch::optim::SGDOptions(0.05).momentum(momentum).nesterov(nesterov));
  }
}

TEST(Optimizer, AdagradIsTorchs) {
  OptimizerConfig config = default_optimizer("adagrad");
  for (const double decay : {0.0, 0.1}) {
    config.weight_decay = decay;
    config.rate_decay = decay / 2;
    expect_steps_of<torch::optim::Adagrad>(
        config, torch::optim::AdagradOptions(config.learning_rate).lr_decay(config.rate_decay));
  }
}

TEST(Optimizer, RmsPropIsTorchs) {
  OptimizerConfig config = default_optimizer("rmsprop");
  config.alpha = 0.95;
  for (const double momentum : {0.0, 0.7}) {
    config.momentum = momentum;
    config.weight_decay = momentum / 10;
    expect_steps_of<torch::optim::RMSprop>(
        config, torch::optim::RMSpropOptions(config.learning_rate).alpha(0.95).momentum(momentum));
  }
}

TEST(Optimizer, AdadeltaIsCadres) {
  OptimizerConfig config = default_optimizer("adadelta");
  config.rho = 0.8;
  config.weight_decay = 0.05;
  expect_steps_of<Adadelta>(config, AdadeltaOptions(config.learning_rate).rho(0.8));
}

}  // namespace
}  // namespace cadre::train
