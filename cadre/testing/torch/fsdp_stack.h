// A model of three units and a root for tests of FullyShardedDataParallel. Its forward may write to
// a weight, and a test can set functions that run during forward and backward.
//
// Threads: each rank has its own model. Blocking: on_two_ranks() until both have ended. Errors: if
// a rank fails, the test fails.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>

#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {

inline constexpr int64_t kWide = 4;

// A layer whose forward may write to the weight.
struct WritingImpl : nn::Module {
  WritingImpl() { weight = register_parameter("weight", torch::ones({kWide, kWide}, kDouble)); }
  Tensor forward(const Tensor& x) {
    if (writes) {
      const torch::NoGradGuard no_grad;
      weight.div_(weight.norm());
    }
    return torch::tanh(torch::matmul(x, weight));
  }
  Tensor weight;
  bool writes = false;
};
using WritingUnit = nn::ModuleHolder<ShardUnit<WritingImpl>>;

struct Stack : nn::Module {
  Stack() {
    first = register_module("first", LinearUnit(kWide, kWide));
    second = register_module("second", LinearUnit(kWide, kWide));
    writing = register_module("writing", WritingUnit());
    head = register_module("head", nn::Linear(kWide, kWide));
    to(torch::kDouble);
    set_values(*this);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = torch::tanh(first->forward(x));
    if (uses_second) h = torch::tanh(second->forward(h));
    if (in_forward) in_forward();
    if (in_backward && h.requires_grad()) {
      h.register_hook([this](const Tensor&) { in_backward(); });
    }
    return head(writing->forward(h));
  }
  LinearUnit first{nullptr}, second{nullptr};
  WritingUnit writing{nullptr};
  nn::Linear head{nullptr};
  bool uses_second = true;
  std::function<void()> in_forward;   // called between the units "second" and "writing"
  std::function<void()> in_backward;  // called between the units "writing" and "second"
};

inline Tensor stack_rows(int rank) {
  return torch::linspace(-1, 1, 3 * kWide, kDouble).view({3, kWide}) * (1 + rank);
}

inline FullyShardedDataParallelOptions units_of_stack() {
  return {.wrap_policy = wrap_shard_units()};
}

inline void on_two_ranks(const std::function<void(const ProcessGroup&)>& body) {
  const auto result = run_groups(2, body);
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace cadre::testing
