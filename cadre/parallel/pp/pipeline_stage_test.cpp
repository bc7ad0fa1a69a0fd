// Tests from what a stage can be made, and how it calls its module.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::StageNet;
using torch::Tensor;

TEST(PipelineStage, RefusesWhatIsNoStage) {
  const std::shared_ptr<StageNet> none;
  EXPECT_THAT(failure_of([&] { PipelineStage(none, {.stage = 0, .num_stages = 2}); }),
              HasSubstr("is empty"));
  const auto net = std::make_shared<StageNet>(0, 2);
  EXPECT_THAT(failure_of([&] { PipelineStage(net, {.stage = 2, .num_stages = 2}); }),
              HasSubstr("there is no stage 2 of 2"));
}

// These modules have all signatures of forward() that a stage supports.
struct TwoTensors : torch::nn::Module {
  std::tuple<Tensor, Tensor> forward(const Tensor& a, Tensor b) { return {a + b, b}; }
};

TEST(PipelineStage, CallsModulesOfEveryForm) {
  const PipelineStage two(std::make_shared<TwoTensors>(), {});
  const Tensor one = torch::ones({2});
  EXPECT_EQ(two.forward({one, one})[0].sum().item<double>(), 4);
  EXPECT_THAT(failure_of([&] { two.forward({one}); }), HasSubstr("takes 2 tensors and is given 1"));
  const PipelineStage sequential(torch::nn::Sequential(torch::nn::Identity()), {});
  EXPECT_EQ(sequential.forward({one}).size(), 1u);
  EXPECT_EQ(PipelineStage(torch::nn::Linear(2, 3), {}).parameters().size(), 2u);
}

}  // namespace
}  // namespace cadre
