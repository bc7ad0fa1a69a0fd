// A small model for the tests of wrappers, and functions that compute its gradients in plain
// PyTorch.
//
// Threads: one. Blocking: never.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/types.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre::testing {

using torch::Tensor;

inline constexpr auto kDouble = torch::kDouble;

struct Net : torch::nn::Module {
  Net() {
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(3, 4));
    second = register_module("second", torch::nn::Linear(4, 2));
    side = register_module("side", torch::nn::Linear(4, 2));
    to(kDouble);
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::tanh(first(x));
    if (!use_side) return second(hidden);
    // `side` is called before `second`, so its gradients come after those of `second`.
    const Tensor extra = side(hidden);
    return second(hidden) + extra;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, side{nullptr};
  bool use_side = true;
};

inline Tensor input() {
  return torch::linspace(-1, 1, 15, kDouble).view({5, 3});
}

inline Tensor loss_of(const Tensor& output) {
  return output.pow(2).mean();
}

// Runs `step` on a copy of `net` without a wrapper, and returns the gradients; undefined for unused
// parameters.
template <typename Step>
std::vector<Tensor> local_gradients(const Net& net, Step step) {
  auto copy = std::make_shared<Net>();
  copy->use_side = net.use_side;
  step(*copy);
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : copy->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

inline void plain_step(Net& net) {
  loss_of(net.forward(input())).backward();
}

inline void expect_gradients(const Net& net, const std::vector<Tensor>& expected, double factor) {
  const auto parameters = net.named_parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    const Tensor& gradient = parameters[i].value().grad();
    ASSERT_EQ(gradient.defined(), expected[i].defined()) << parameters[i].key();
    if (!gradient.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient, expected[i] * factor, 1e-12, 1e-14))
        << parameters[i].key() << "\n"
        << gradient << "\n"
        << expected[i] * factor;
  }
}

template <typename Function>
std::string error_of(Function function, ErrorCode code) {
  try {
    function();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

// An autograd function that returns x. Its backward throws if `fail` is set, and returns an
// undefined gradient for its second argument.
struct Probe : torch::autograd::Function<Probe> {
  // Static, because forward() and backward() of a torch::autograd::Function are. A test that sets
  // it must reset it.
  static inline bool fail = false;
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x, const Tensor&) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    if (fail) throw std::runtime_error("probe failed");
    return {grads[0], Tensor()};
  }
};

}  // namespace cadre::testing
