// Tests that all ranks throw for stages, schedules and options from which no pipeline can be made.
// Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::pipeline_plan_test {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::StageNet;
using testing::tokens_of;
using torch::Tensor;

PipelineStage stage_of(int stage, int num_stages) {
  return {std::make_shared<StageNet>(stage, num_stages),
          {.stage = stage, .num_stages = num_stages}};
}

// Runs `body` on two ranks and returns their errors. Checks that the group still works afterwards.
std::vector<std::string> refusals(const std::function<void(const ProcessGroup&)>& body) {
  std::vector<std::string> texts(2);
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    texts[group.rank()] = failure_of([&] { body(group); });
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return texts;
}

void expect_refused(const std::function<void(const ProcessGroup&)>& body, const std::string& text) {
  for (const std::string& refusal : refusals(body)) {
    EXPECT_THAT(refusal, HasSubstr("kInvalidArgument"));
    EXPECT_THAT(refusal, HasSubstr(text));
  }
}

TEST(PipelineMisuse, StagesAreWhereTheScheduleSays) {
  expect_refused([](const ProcessGroup& group) { Pipeline({stage_of(0, 2)}, group); },
                 "stage 0 of 2 is held by rank 0 and 1; the schedule places it on rank 0 alone");
  expect_refused(
      [](const ProcessGroup& group) { Pipeline({stage_of(1 - group.rank(), 2)}, group); },
      "stage 0 of 2 is held by rank 1; the schedule places it on rank 0 alone");
  expect_refused([](const ProcessGroup& group) { Pipeline({stage_of(group.rank(), 3)}, group); },
                 "of 3 stages, but the schedule is for 2");
  expect_refused([](const ProcessGroup& group) { Pipeline({}, group); }, "holds no stage");
  expect_refused(
      [](const ProcessGroup& group) {
        const int stage = 2 * group.rank();
        Pipeline({stage_of(stage, 4), stage_of(stage, 4)}, group,
                 {.schedule = "interleaved-1f1b", .num_microbatches = 2});
      },
      "twice");
}

TEST(PipelineMisuse, AllRanksHaveOneSchedule) {
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 2)}, group,
                 {.schedule = group.rank() == 0 ? "1f1b" : "gpipe", .num_microbatches = 4});
      },
      "the schedule is one of 2 stages and 4 microbatches");
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 2)}, group, {.num_microbatches = 4 + group.rank()});
      },
      "of 2 stages and 5 microbatches");
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 2)}, group, {.schedule = "2f2b"});
      },
      "there is no schedule \"2f2b\"; there are \"gpipe\"");
  PipelineSchedule for_three;
  for_three.rank_of_stage = {0, 1, 2};
  for_three.ranks.resize(3);
  for_three.num_microbatches = 1;
  expect_refused(
      [&](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 3)}, group, {.schedule = for_three});
      },
      "the schedule is for 3 ranks, but the group has 2");
}

TEST(PipelineMisuse, AScheduleThatDoesNothingIsRefused) {
  PipelineSchedule schedule;
  schedule.rank_of_stage = {0, 1};
  schedule.ranks.resize(2);
  for (const int num_microbatches : {0, -3}) {
    schedule.num_microbatches = num_microbatches;
    expect_refused(
        [&](const ProcessGroup& group) {
          Pipeline({stage_of(group.rank(), 2)}, group, {.schedule = schedule});
        },
        "microbatches; it needs at least one of each");
  }
}

TEST(PipelineMisuse, OneRanksRefusalEndsTheConstructorOnAll) {
  const auto texts = refusals([](const ProcessGroup& group) {
    Pipeline({stage_of(group.rank(), 2)}, group,
             {.schedule = group.rank() == 0 ? "1f1b" : "unknown"});
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("there is no schedule \"unknown\""));
    EXPECT_THAT(text, HasSubstr("(on rank 1 of 2 of group \"world\")"));
  }
}

TEST(PipelineMisuse, AMeshHasOneAxis) {
  expect_refused(
      [](const ProcessGroup& group) {
        const DeviceMesh mesh(group, {{"dp", 1}, {"pp", 2}});
        Pipeline({stage_of(group.rank(), 2)}, mesh);
      },
      "has 2 axes; pass one of them: mesh[\"pp\"]");
}

TEST(PipelineMisuse, AMovedFromStageIsRefused) {
  expect_refused(
      [](const ProcessGroup& group) {
        std::vector<PipelineStage> stages{stage_of(group.rank(), 2)};
        const PipelineStage taken = std::move(stages[0]);
        Pipeline(stages, group);
      },
      "was moved from");
}

// A null function pointer does not count as a loss function.
TEST(PipelineMisuse, ANullLossIsRefused) {
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline pipeline({stage_of(group.rank(), 2)}, group);
        const std::function<Tensor(const Tensor&, const Tensor&)> null;
        pipeline.step(tokens_of(2, 0), tokens_of(2, 0), null);
      },
      "so it needs a loss function");
}

}  // namespace
}  // namespace cadre::pipeline_plan_test
