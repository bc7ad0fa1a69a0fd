// A network with special parameters (tied, frozen, rarely used) and its training step, for the
// tests of ZeroRedundancyOptimizer.
//
// Threads: one rank each. Blocking: train_step(), which reduces the gradients. Errors: those of the
// group; require_same() throws at a parameter that differs.
#pragma once

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/zero_gradients.h"

namespace cadre::zero_net {

using testing::reduce_gradients;
using testing::require;
using torch::Tensor;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// A model with a layer that is registered under two names, a frozen parameter, and a parameter that
// only some steps use. Its values are deterministic, because ranks are threads that share one
// random generator.
struct Net : torch::nn::Module {
  Net() {
    in = register_module("in", torch::nn::Linear(5, 7));
    out = register_module("out", torch::nn::Linear(7, 5));
    rare = register_module("rare", torch::nn::Linear(7, 3));
    frozen = register_parameter("frozen", torch::ones({7}), /*requires_grad=*/false);
    scale = register_parameter("scale", torch::ones({}));
    again = register_module("again", in);
    const torch::NoGradGuard no_grad;
    double first = 0.5;
    for (Tensor& parameter : parameters()) {
      const Tensor numbers = torch::arange(parameter.numel()) * 0.37 + first++;
      parameter.copy_(torch::sin(numbers).view(parameter.sizes()));
    }
  }
  Tensor forward(const Tensor& x, bool uses_rare) {
    Tensor hidden = torch::tanh(in(x)) * frozen;
    Tensor loss = (out(hidden) * scale).pow(2).mean() + (x * again->weight.mean()).mean();
    if (uses_rare) loss = loss + rare(hidden).pow(2).mean();
    return loss;
  }
  torch::nn::Linear in{nullptr}, out{nullptr}, rare{nullptr}, again{nullptr};
  Tensor frozen, scale;
};

inline Tensor input_of(int step, int rank) {
  return torch::cos(torch::arange(20) * 0.3 + step + 10 * rank).view({4, 5});
}

// Runs one training step with ZeRO stage 1. Every third step does not use the parameter `rare`.
inline void train_step(Net& net, const ProcessGroup& group, torch::optim::Optimizer& optimizer,
                       int step) {
  optimizer.zero_grad();
  net.forward(input_of(step, group.rank()), step % 3 != 2).backward();
  reduce_gradients(net, group, 1.0 / group.world_size());
  optimizer.step();
}

inline std::vector<Tensor> values_of(const Net& net) {
  std::vector<Tensor> values;
  for (const Tensor& parameter : net.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

inline void require_same(const Net& a, const Net& b, const std::string& what) {
  for (const auto& item : a.named_parameters()) {
    require(torch::equal(item.value(), b.named_parameters()[item.key()]), what + ": " + item.key());
  }
}

inline torch::optim::AdamWOptions options() {
  return torch::optim::AdamWOptions(0.01).weight_decay(0.1);
}

inline Groups groups_of(const Net& net) {
  std::vector<Tensor> matrices;
  std::vector<Tensor> others;
  for (const auto& item : net.named_parameters()) {
    if (item.key().starts_with("again")) continue;
    (item.value().dim() >= 2 ? matrices : others).push_back(item.value());
  }
  Groups groups;
  groups.emplace_back(matrices);
  groups.emplace_back(others, std::make_unique<torch::optim::AdamWOptions>(
                                  torch::optim::AdamWOptions(0.002).weight_decay(0.5)));
  return groups;
}

inline constexpr ZeroOptions kManyBuckets{.bucket_cap_bytes = 200};

}  // namespace cadre::zero_net
