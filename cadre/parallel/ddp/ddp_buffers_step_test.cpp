// Tests a model with buffers if one rank leaves out a backward. That rank is in the buffer
// broadcast of its next forward while the other ranks are in the reduction of their backward. The
// error must say so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct NormalizedNet : torch::nn::Module {
  NormalizedNet() {
    linear = register_module("linear", torch::nn::Linear(3, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

struct BuffersStepCase {
  const char* name;
  int world_size;
  int rank;  // the rank that leaves out the backward of step 3
  GradientWeighting weighting;
};

class DdpBuffersStep : public ::testing::TestWithParam<BuffersStepCase> {};

TEST_P(DdpBuffersStep, TheErrorNamesTheModuleAndTheForwardOfEachRank) {
  const BuffersStepCase& test = GetParam();
  const auto result =
      testing::run_groups(test.world_size, [&](const ProcessGroup& group, std::string& out) {
        DistributedDataParallel model{
            std::make_shared<NormalizedNet>(), group, {.weighting = test.weighting}};
        for (int step = 1; step <= 5 && out.empty(); ++step) {
          out = testing::failure_of([&] {
            const at::Tensor loss = model(torch::rand({4, 3})).square().sum();
            if (group.rank() == test.rank && step == 3) return;
            loss.backward();
          });
        }
      });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (int rank = 0; rank < test.world_size; ++rank) {
    const std::string place = rank == test.rank
                                  ? "its forward 4, which begins with rank 0's buffers"
                                  : "the backward() after its forward 3";
    EXPECT_THAT(result.ranks[static_cast<size_t>(rank)].output,
                AllOf(HasSubstr("DistributedDataParallel of "), HasSubstr("NormalizedNet"),
                      HasSubstr(format("rank {}, in {}: ", rank, place)),
                      HasSubstr("Leave out a step on all ranks or on none"),
                      HasSubstr("the ranks disagree: ")));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DdpBuffersStep,
    ::testing::Values(BuffersStepCase{"by_samples", 2, 1, GradientWeighting::kSamples},
                      BuffersStepCase{"equal_weights", 2, 0, GradientWeighting::kEqual},
                      BuffersStepCase{"three_ranks", 3, 2, GradientWeighting::kSamples}),
    [](const auto& test) { return test.param.name; });

TEST(DdpBuffersStepTest, ACallOfMeanOverRanksOnOneRankOnlyIsLocatedToo) {
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& out) {
    DistributedDataParallel model{std::make_shared<NormalizedNet>(), group};
    out = testing::failure_of([&] {
      const at::Tensor loss = model(torch::rand({4, 3})).square().sum();
      if (group.rank() == 0) model.mean_over_ranks(loss);
      loss.backward();
    });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output, HasSubstr("in mean_over_ranks() after its forward 1: "));
  EXPECT_THAT(result.ranks[1].output, HasSubstr("in the backward() after its forward 1: "));
}

// The constructor throws for a dtype that collectives do not support. This error must not say
// anything about the order of calls.
TEST(DdpBuffersStepTest, OtherRefusalsDoNotSpeakOfSteps) {
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& out) {
    const auto linear = std::make_shared<torch::nn::LinearImpl>(3, 2);
    linear->to(torch::kComplexFloat);
    out = testing::failure_of([&] { DistributedDataParallel(linear, group); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output, AllOf(Not(HasSubstr("no error")), Not(HasSubstr("step"))));
}

}  // namespace
}  // namespace cadre
