// Tests the list of a pipeline's parameters: each tensor is listed once, and tied parameters count
// once in a norm, whatever names they have in the stages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::run_groups;
using torch::Tensor;

// Returns a leaf with a gradient of ones.
Tensor leaf(int64_t numel) {
  Tensor tensor = torch::zeros({numel}, torch::kDouble).requires_grad_();
  tensor.mutable_grad() = torch::ones({numel}, torch::kDouble);
  return tensor;
}

PipelineStage stage_with(int stage, int num_stages, std::vector<NamedTensor> parameters) {
  return {[](const std::vector<Tensor>& inputs) { return inputs; },
          std::move(parameters),
          {.stage = stage, .num_stages = num_stages}};
}

std::vector<std::string> names_of(const std::vector<ParameterShard>& records) {
  std::vector<std::string> names;
  for (const ParameterShard& record : records) names.push_back(record.name);
  return names;
}

void expect_norm(const std::vector<ParameterShard>& records, double squared) {
  EXPECT_NEAR(gradient_norm(std::span<const ParameterShard>(records), 2.0), std::sqrt(squared),
              1e-12);
}

TEST(StageRecords, ATiedTensorWithTwoNamesInAStageCountsOnce) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor table = leaf(3);
    std::vector<NamedTensor> parameters;
    if (group.rank() == 0) {
      parameters = {{"other", leaf(5)}, {"table", table}};
    } else {
      parameters = {{"head", table}, {"head_again", table}};
    }
    Pipeline pipeline({stage_with(group.rank(), 2, parameters)}, group);
    pipeline.tie_parameters({{0, "table"}, {1, "head_again"}});
    EXPECT_THAT(names_of(pipeline.parameter_shards()), ::testing::ElementsAre("other", "table"));
    expect_norm(pipeline.parameter_shards(), 5 + 3);
    EXPECT_EQ(pipeline.parameters().size(), group.rank() == 0 ? 2u : 1u);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Stages 1 and 3, both on rank 1, have the same tensor. It is listed under its name in stage 1.
TEST(StageRecords, ATiedTensorOfTwoStagesOfARankCountsOnce) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor shared = leaf(3);
    std::vector<PipelineStage> stages;
    for (const int stage : {group.rank(), group.rank() + 2}) {
      const Tensor own = group.rank() == 0 ? leaf(3) : shared;
      stages.push_back(stage_with(stage, 4, {{"weight" + std::to_string(stage), own}}));
    }
    Pipeline pipeline(stages, group, {.schedule = "interleaved-1f1b", .num_microbatches = 2});
    pipeline.tie_parameters({{0, "weight0"}, {3, "weight3"}});
    EXPECT_THAT(names_of(pipeline.parameter_shards()),
                ::testing::ElementsAre("weight0", "weight2"));
    expect_norm(pipeline.parameter_shards(), 3 + 3);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 0 has the two tied tensors, which are listed with the same name; the second one is a copy.
TEST(StageRecords, TwoTiedTensorsOfARankHaveOneName) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    std::vector<PipelineStage> stages;
    for (const int stage : {group.rank(), 3 - group.rank()}) {
      stages.push_back(stage_with(stage, 4, {{"weight" + std::to_string(stage), leaf(3)}}));
    }
    Pipeline pipeline(stages, group, {.schedule = "zb-v", .num_microbatches = 4});
    pipeline.tie_parameters({{0, "weight0"}, {3, "weight3"}});
    const auto records = pipeline.parameter_shards();
    EXPECT_THAT(names_of(records),
                ::testing::ElementsAre("weight0", "weight1", "weight2", "weight0"));
    EXPECT_FALSE(records.front().is_copy);
    EXPECT_TRUE(records.back().is_copy);
    expect_norm(records, 3 + 3 + 3);
    EXPECT_EQ(pipeline.parameters().size(), 2u);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
