#include "cadre/core/schedule/schedule.h"

#include <gmock/gmock.h>

#include <vector>

namespace cadre {
namespace {

using ::testing::ElementsAre;

TEST(PipelineScheduleTest, StagesGoAroundTheRanksOrBackAndForth) {
  EXPECT_THAT(place_stages(StagePlacement::kLoop, {.num_ranks = 3, .stages_per_rank = 2}),
              ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(place_stages(StagePlacement::kV, {.num_ranks = 3, .stages_per_rank = 3}),
              ElementsAre(0, 1, 2, 2, 1, 0, 0, 1, 2));
}

PipelineAction act(PipelineActionKind kind, int stage, int microbatch) {
  return {.kind = kind, .stage = stage, .microbatch = microbatch};
}

TEST(PipelineScheduleTest, AnActivationLivesFromItsForwardToItsBackwardOrWeightGradient) {
  using Kind = PipelineActionKind;
  PipelineSchedule schedule{.rank_of_stage = {0, 1}, .num_microbatches = 2};
  schedule.ranks = {
      {act(Kind::kForward, 0, 0), act(Kind::kForward, 0, 1), act(Kind::kInputGrad, 0, 0),
       act(Kind::kWeightGrad, 0, 0), act(Kind::kBackward, 0, 1)},
      {act(Kind::kForward, 1, 0),
       act(Kind::kBackward, 1, 0),
       {.kind = Kind::kOverlap, .parts = {act(Kind::kForward, 1, 1), act(Kind::kBackward, 1, 1)}}}};
  EXPECT_THAT(peak_live_activations(schedule), ElementsAre(2, 1));
  // The activation of microbatch 0 stays live, because an I without a W does not end its use.
  schedule.ranks[0] = {act(Kind::kForward, 0, 0), act(Kind::kInputGrad, 0, 0),
                       act(Kind::kForward, 0, 1)};
  EXPECT_THAT(peak_live_activations(schedule), ElementsAre(2, 1));
}

TEST(PipelineScheduleTest, TheLoweredFormHasMessages) {
  PipelineSchedule schedule{.rank_of_stage = {0, 1}, .num_microbatches = 1};
  schedule.ranks = {{act(PipelineActionKind::kForward, 0, 0)},
                    {act(PipelineActionKind::kForward, 1, 0)}};
  EXPECT_FALSE(has_messages(schedule));
  schedule.ranks[1].insert(schedule.ranks[1].begin(), act(PipelineActionKind::kRecvForward, 1, 0));
  EXPECT_TRUE(has_messages(schedule));
  EXPECT_EQ(schedule.num_ranks(), 2);
  EXPECT_EQ(schedule.num_stages(), 2);
}

}  // namespace
}  // namespace cadre
