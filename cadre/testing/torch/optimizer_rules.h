// Helpers for the tests of the fused optimizers: parameters of unusual shapes, equal gradients for
// two copies of them, and the optimizers to test with their options.
#pragma once

#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cmath>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/optim/optimizers.h"

namespace cadre::optim_test {

using Tensors = std::vector<at::Tensor>;
using Optimizer = torch::optim::Optimizer;

constexpr double kRate = 0.01;

// A kind of optimizer with its options. `ours` makes Cadre's optimizer and `torchs` that of
// torch::optim, each with two parameter groups.
struct Rule {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> ours;
  std::function<std::unique_ptr<Optimizer>(const Tensors&)> torchs;

  friend void PrintTo(const Rule& rule, std::ostream* out) { *out << rule.name; }
};

// Makes an optimizer with two groups; the first half of the parameters has twice the learning rate.
template <typename Made, typename Options>
std::unique_ptr<Optimizer> make(const Tensors& parameters, const Options& options) {
  const auto middle = parameters.begin() + static_cast<std::ptrdiff_t>(parameters.size() / 2);
  auto faster = std::make_unique<Options>(options);
  faster->set_lr(2 * kRate);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Tensors(parameters.begin(), middle), std::move(faster));
  groups.emplace_back(Tensors(middle, parameters.end()), std::make_unique<Options>(options));
  return std::make_unique<Made>(std::move(groups), options);
}

template <typename Ours, typename Torchs, typename Options>
Rule rule(std::string name, const Options& options) {
  return {std::move(name),
          [options](const Tensors& parameters) { return make<Ours>(parameters, options); },
          [options](const Tensors& parameters) { return make<Torchs>(parameters, options); }};
}

inline std::vector<Rule> rules() {
  const torch::optim::AdamWOptions adamw(kRate);
  const torch::optim::AdamOptions adam(kRate);
  const torch::optim::SGDOptions sgd(kRate);
  const auto of_adamw = [](std::string name, const torch::optim::AdamWOptions& options) {
    return rule<AdamW, torch::optim::AdamW>(std::move(name), options);
  };
  const auto of_adam = [](std::string name, const torch::optim::AdamOptions& options) {
    return rule<Adam, torch::optim::Adam>(std::move(name), options);
  };
  const auto of_sgd = [](std::string name, const torch::optim::SGDOptions& options) {
    return rule<SGD, torch::optim::SGD>(std::move(name), options);
  };
  const auto of_adagrad = [](std::string name, const torch::optim::AdagradOptions& options) {
    return rule<Adagrad, torch::optim::Adagrad>(std::move(name), options);
  };
  const torch::optim::AdagradOptions adagrad(kRate);
  auto slowing = adagrad;
  auto amsgrad_w = adamw;
  auto amsgrad = adam;
  auto decayed = adamw;
  auto strange = adam;
  auto momentum = sgd;
  auto dampened = sgd;
  auto nesterov = sgd;
  auto pulled = sgd;
  return {of_adamw("AdamW", adamw),
          of_adamw("AdamW_decay_0", decayed.weight_decay(0)),
          of_adamw("AdamW_amsgrad", amsgrad_w.amsgrad(true).weight_decay(0.1)),
          of_adam("Adam", adam),
          of_adam("Adam_betas_eps", strange.betas({0.4, 0.9}).eps(1e-3)),
          of_adam("Adam_amsgrad_decay", amsgrad.amsgrad(true).weight_decay(0.1)),
          of_sgd("SGD", sgd),
          of_sgd("SGD_decay", pulled.weight_decay(0.1)),
          of_sgd("SGD_momentum", momentum.momentum(0.9)),
          of_sgd("SGD_dampening", dampened.momentum(0.9).dampening(0.3).weight_decay(0.1)),
          of_sgd("SGD_nesterov", nesterov.momentum(0.8).nesterov(true).weight_decay(0.1)),
          of_adagrad("Adagrad", adagrad),
          of_adagrad("Adagrad_decays",
                     slowing.lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5))};
}

// Returns leaves of many shapes and strides: a matrix, a transposed matrix, filters in
// channels_last, odd lengths, a length of several SIMD vectors, a scalar and an empty tensor.
// set_gradients() leaves the last leaf without a gradient in many steps.
inline Tensors make_parameters(at::ScalarType dtype) {
  torch::manual_seed(1);
  Tensors parameters = {
      torch::randn({5, 3}),
      torch::randn({24, 16}).t(),
      torch::randn({3, 2, 5, 5}).to(at::MemoryFormat::ChannelsLast),
      torch::randn({1}),
      torch::randn({1031}),
      torch::randn({64, 32}),
      torch::randn({}),
      torch::randn({0}),
      torch::randn({17, 2}),
  };
  for (at::Tensor& parameter : parameters) {
    parameter = parameter.to(dtype).detach().requires_grad_(true);
  }
  return parameters;
}

inline Tensors copies(const Tensors& tensors) {
  Tensors made;
  for (const at::Tensor& tensor : tensors) {
    made.push_back(tensor.detach().clone().requires_grad_(tensor.requires_grad()));
  }
  return made;
}

// Sets the same gradients for both lists. The gradients are contiguous, so for transposed
// parameters their strides differ from those of the parameter.
inline void set_gradients(const Tensors& a, const Tensors& b, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < a.size(); ++i) {
    const at::Tensor gradient =
        torch::randn(a[i].sizes(), at::TensorOptions().dtype(a[i].scalar_type()));
    const bool has_one = i + 1 < a.size() || step % 3 == 1;
    a[i].mutable_grad() = has_one ? gradient : at::Tensor();
    b[i].mutable_grad() = has_one ? gradient.clone() : at::Tensor();
  }
}

// Returns the allowed difference between two computations of `num_steps` steps with the learning
// rate kRate. Each rounds a parameter p at most twice in a step (decay, update), by at most half of
// epsilon * abs(p). The error of the update itself, about ten rounded operations, is small in
// comparison. The bound is twice the sum of these errors.
inline double bound(const at::Tensor& parameter, int num_steps) {
  const double epsilon =
      parameter.scalar_type() == at::kDouble ? std::ldexp(1, -52) : std::ldexp(1, -23);
  const double scale = parameter.numel() == 0 ? 0 : parameter.abs().max().item<double>();
  return 4 * epsilon * num_steps * std::max(scale, 1.0);
}

// Runs a step and returns its error message; "" if it succeeds.
inline std::string refusal(Optimizer& optimizer) {
  try {
    optimizer.step();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return {};
}

}  // namespace cadre::optim_test
