// Tests the errors for parameters and buffers that parallelize_module() cannot divide: another
// module has them, too, another tensor shares their memory, or they have no values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/tp_refusal.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using testing::refusal_of_plan;
using testing::run_groups;
using torch::Tensor;

// If the table were divided, the other module would use this rank's part as if it were the whole
// table.
TEST(ParallelizedTensors, RefusesADividedWeightThatAnotherModuleHas) {
  struct Head : torch::nn::Module {
    explicit Head(const Tensor& table) { weight = register_parameter("kernel", table); }
    Tensor weight;
  };
  struct Foreign : torch::nn::Module {
    Foreign() {
      table = register_module("table", Embedding(11, 6));
      head = register_module("head", std::make_shared<Head>(table->weight));
    }
    Embedding table{nullptr};
    std::shared_ptr<Head> head;
  };
  for (const bool is_named : {false, true}) {
    Foreign model;
    std::vector<PlanEntry> plan = {{"table", ParallelStyle::kRowwise}};
    if (is_named) plan.push_back({"head", ParallelStyle::kReplicated});
    const std::string message = refusal_of_plan(model, plan);
    EXPECT_THAT(message, HasSubstr("parallelize_module: the parameter \"kernel\" of \"head\" is "
                                   "also one that the plan divides"));
    EXPECT_FALSE(model.table->is_parallelized());
  }
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Foreign whole;
    parallelize_module(whole, DeviceMesh(group, {{"tp", 2}}),
                       {{"table", ParallelStyle::kReplicated}});
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If the weight were divided, each rank would copy its part to new memory, and the two tensors
// would no longer be equal.
TEST(ParallelizedTensors, RefusesAWeightWhoseMemoryAnotherTensorHas) {
  struct Tied : torch::nn::Module {
    Tied() {
      table = register_module("table", Embedding(11, 6));
      head = register_module("head", Linear(torch::nn::LinearOptions(6, 11).bias(false)));
      head->weight.set_data(table->weight.detach());
    }
    Embedding table{nullptr};
    Linear head{nullptr};
  };
  Tied model;
  EXPECT_THAT(refusal_of_plan(
                  model, {{"table", ParallelStyle::kRowwise}, {"head", ParallelStyle::kColwise}}),
              HasSubstr("parallelize_module: \"table.weight\" and \"head.weight\" share memory"));
  EXPECT_FALSE(model.table->is_parallelized());
  // If both tensors stay whole on every rank, they stay equal, so there is no error.
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Tied whole;
    parallelize_module(whole, DeviceMesh(group, {{"tp", 2}}),
                       {{"table", ParallelStyle::kReplicated}});
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The overlap is found even if a third, smaller tensor lies between the starts of the two tensors
// that overlap.
TEST(ParallelizedTensors, RefusesAWeightWithinABufferThatHasASmallerOneBeforeIt) {
  struct Model : torch::nn::Module {
    Model() {
      const torch::Tensor all = register_buffer("all", torch::zeros({100}));
      register_buffer("few", all.narrow(0, 2, 4));
      head = register_module("head", Linear(torch::nn::LinearOptions(6, 11).bias(false)));
      head->weight.set_data(all.narrow(0, 20, 66).view({11, 6}));
    }
    Linear head{nullptr};
  };
  Model model;
  EXPECT_THAT(refusal_of_plan(model, {{"head", ParallelStyle::kColwise}}),
              HasSubstr("parallelize_module: \"head.weight\" and \"all\" share memory"));
}

// Deferred modules also have their parameters on the meta device.
TEST(ParallelizedTensors, RefusesTensorsOnTheMetaDevice) {
  struct Model : torch::nn::Module {
    explicit Model(bool is_parameter) {
      head = register_module("head", Linear(torch::nn::LinearOptions(6, 11)));
      const torch::Tensor scale = torch::ones({11}, torch::kMeta);
      is_parameter ? register_parameter("scale", scale) : register_buffer("scale", scale);
    }
    Linear head{nullptr};
  };
  for (const bool is_parameter : {true, false}) {
    Model model(is_parameter);
    EXPECT_THAT(
        refusal_of_plan(model, {{"head", ParallelStyle::kColwise}}),
        HasSubstr("parallelize_module: the values of \"scale\" are not available; the tensor is "
                  "deferred or on the meta device, and needs materialize() first"));
    EXPECT_FALSE(model.head->is_parallelized());
  }
}

}  // namespace
}  // namespace cadre
