// Tests that model_sizes_of() returns the sizes of a module's registered parameters, even if the
// module is deferred.
#include "cadre/parallel/plan/model_sizes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <memory>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/plan/memory_plan.h"

namespace cadre {
namespace {

struct SizedBlockImpl : torch::nn::Module {
  SizedBlockImpl() : up(3, 5) {
    register_module("up", up);
    register_buffer("table", torch::zeros({7}, torch::kDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) { return up(x); }
  torch::nn::Linear up;
};
using SizedBlock = torch::nn::ModuleHolder<ShardUnit<SizedBlockImpl>>;

// A model whose root has a frozen parameter of another dtype, and a weight that is registered under
// two names.
struct SizedNet : torch::nn::Module {
  SizedNet() {
    first = register_module("first", SizedBlock());
    second = register_module("second", SizedBlock());
    tied = register_parameter("tied", torch::zeros({4, 2}));
    register_parameter("tied_too", tied);
    register_parameter("frozen", torch::zeros({6}, torch::kBFloat16), /*requires_grad=*/false);
  }
  SizedBlock first{nullptr}, second{nullptr};
  torch::Tensor tied;
};

void expect_sizes_of_net(const ModelSizes& sizes, size_t first_unit, size_t second_unit) {
  struct Expected {
    const char* name;
    std::vector<int64_t> sizes;
    DType dtype;
    bool is_trained;
    size_t unit;
  };
  const std::vector<Expected> expected = {
      {"tied", {4, 2}, DType::kFloat32, true, 0},
      {"frozen", {6}, DType::kBfloat16, false, 0},
      {"first.up.weight", {5, 3}, DType::kFloat32, true, first_unit},
      {"first.up.bias", {5}, DType::kFloat32, true, first_unit},
      {"second.up.weight", {5, 3}, DType::kFloat32, true, second_unit},
      {"second.up.bias", {5}, DType::kFloat32, true, second_unit}};
  ASSERT_EQ(sizes.parameters.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const ParameterSize& parameter = sizes.parameters[i];
    EXPECT_EQ(parameter.name, expected[i].name);
    EXPECT_EQ(parameter.sizes, expected[i].sizes) << parameter.name;
    EXPECT_EQ(parameter.dtype, expected[i].dtype) << parameter.name;
    EXPECT_EQ(parameter.is_trained, expected[i].is_trained) << parameter.name;
    EXPECT_EQ(parameter.unit, expected[i].unit) << parameter.name;
  }
  EXPECT_EQ(sizes.buffer_bytes, 2 * 7 * 8);
}

TEST(ModelSizesOf, AModuleWithDeclaredUnits) {
  const auto net = std::make_shared<SizedNet>();
  fully_shard(net->second);
  const ModelSizes sizes = model_sizes_of(net);
  ASSERT_EQ(sizes.units.size(), 2U);
  EXPECT_EQ(sizes.units[1].name, "second");
  expect_sizes_of_net(sizes, 0, 1);
}

TEST(ModelSizesOf, ADeferredModuleAndAPolicy) {
  const auto net = defer_init([] { return std::make_shared<SizedNet>(); });
  const ModelSizes sizes = model_sizes_of(net, wrap_shard_units());
  ASSERT_EQ(sizes.units.size(), 3U);
  expect_sizes_of_net(sizes, 1, 2);
  EXPECT_TRUE(is_deferred(net->tied));
  // The expected bytes: each of two layers has 15 + 5 float32 elements, the tied weight has 8, and
  // the frozen parameter has 6 bfloat16 elements.
  EXPECT_EQ(plan_memory(sizes, {.strategy = DataStrategy::kSingle}).held.parameters,
            4 * (2 * 20 + 8) + 2 * 6);
}

TEST(ModelSizesOf, WhatHasNoSizesIsRefused) {
  const auto net = std::make_shared<SizedNet>();
  net->register_parameter("complex", torch::zeros({2}, torch::kComplexFloat));
  const auto refusal_of = [](const std::shared_ptr<torch::nn::Module>& module) -> std::string {
    try {
      (void)model_sizes_of(module);
    } catch (const Error& error) {
      return std::string(error.message());
    }
    return "nothing";
  };
  EXPECT_EQ(refusal_of(net),
            "model_sizes_of: the parameter \"complex\" is ComplexFloat, which no group can reduce; "
            "use float16, bfloat16, float32 or float64");
  EXPECT_EQ(refusal_of(nullptr), "model_sizes_of: the module is null; construct it first");
}

}  // namespace
}  // namespace cadre
