// Tests the order in which the actions of all ranks can run, and which actions each of them needs.
#include "cadre/core/schedule/schedule_walk.h"

#include <gmock/gmock.h>

#include <string>
#include <utility>
#include <vector>

#include "cadre/core/schedule/lowering.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns "rank:action" for each action in the order of the walk.
std::vector<std::string> walked(const PipelineSchedule& schedule) {
  std::vector<std::string> visited;
  const PipelineIndex index = PipelineIndex::make(schedule).value_or_throw();
  walk_pipeline(schedule, index, [&](const PipelineVisit& visit) {
    visited.push_back(cadre::format("{}:{}", visit.position.rank, to_text(visit.action)));
  }).value_or_throw();
  return visited;
}

TEST(PipelineWalkTest, EveryRankRunsItsNextActionInTurnIfWhatItNeedsHasRun) {
  const PipelineSchedule schedule = make(PipelineScheduleKind::k1F1B, 2, 2);
  EXPECT_THAT(walked(schedule),
              ElementsAre("0:0F0", "1:1F0", "0:0F1", "1:1B0", "0:0B0", "1:1F1", "1:1B1", "0:0B1"));
}

TEST(PipelineWalkTest, AComputationNeedsItsInputAndABackwardItsForward) {
  const PipelineSchedule schedule = make(PipelineScheduleKind::k1F1B, 2, 2);
  const PipelineIndex index = PipelineIndex::make(schedule).value_or_throw();
  const auto needs_of = [&](PipelineActionKind kind, int stage, int microbatch) {
    std::vector<std::string> texts;
    for (const PipelinePosition& need :
         index.needs_of(schedule, {.kind = kind, .stage = stage, .microbatch = microbatch})
             .value_or_throw()) {
      texts.push_back(to_text(schedule.ranks[need.rank][need.step]));
    }
    return texts;
  };
  EXPECT_THAT(needs_of(PipelineActionKind::kForward, 0, 1), ElementsAre());
  EXPECT_THAT(needs_of(PipelineActionKind::kForward, 1, 1), ElementsAre("0F1"));
  EXPECT_THAT(needs_of(PipelineActionKind::kBackward, 1, 0), ElementsAre("1F0"));
  EXPECT_THAT(needs_of(PipelineActionKind::kBackward, 0, 0), ElementsAre("0F0", "1B0"));
  EXPECT_EQ(describe(schedule, {.rank = 1, .step = 1}), "rank 1, step 1 (1B0)");
}

TEST(PipelineWalkTest, InTheLoweredFormAReceiveBringsTheInput) {
  const PipelineSchedule schedule =
      lower_pipeline(make(PipelineScheduleKind::kGPipe, 2, 1), {}).value_or_throw();
  const PipelineIndex index = PipelineIndex::make(schedule).value_or_throw();
  const auto needs =
      index.needs_of(schedule, {.kind = PipelineActionKind::kForward, .stage = 1, .microbatch = 0})
          .value_or_throw();
  ASSERT_EQ(needs.size(), 1U);
  EXPECT_EQ(to_text(schedule.ranks[needs[0].rank][needs[0].step]), "1RECV_F0");
  EXPECT_EQ(needs[0].rank, 1);
}

TEST(PipelineWalkTest, ActionsThatDoNotFitAreRefusedWithTheirPlace) {
  const auto refusal_with = [](const PipelineAction& action) {
    PipelineSchedule schedule = make(PipelineScheduleKind::k1F1B, 2, 2);
    schedule.ranks[1].push_back(action);
    const auto index = PipelineIndex::make(schedule);
    return index.ok() ? "none" : index.error().message();
  };
  using Kind = PipelineActionKind;
  EXPECT_THAT(refusal_with({.kind = Kind::kForward, .stage = 2, .microbatch = 0}),
              HasSubstr("there is no stage 2; the schedule has 2"));
  EXPECT_THAT(refusal_with({.kind = Kind::kForward, .stage = 0, .microbatch = 0}),
              HasSubstr("stage 0 belongs to rank 0"));
  EXPECT_THAT(refusal_with({.kind = Kind::kForward, .stage = 1, .microbatch = 2}),
              HasSubstr("there is no microbatch 2; the schedule has 2"));
  EXPECT_THAT(refusal_with({.kind = Kind::kForward, .stage = 1}),
              HasSubstr("needs the number of a microbatch"));
  EXPECT_THAT(refusal_with({.kind = Kind::kReduceGrad, .stage = 1, .microbatch = 0}),
              HasSubstr("concerns all microbatches, not one"));
  EXPECT_THAT(refusal_with({.kind = Kind::kOverlap}), HasSubstr("has 0 parts"));
  EXPECT_THAT(refusal_with({.kind = Kind::kForward, .stage = 1, .microbatch = 0}),
              HasSubstr("rank 1, step 4 (1F0)"));
}

TEST(PipelineWalkTest, RanksThatWaitForEachOtherAreADeadlock) {
  PipelineSchedule schedule = make(PipelineScheduleKind::kGPipe, 2, 1);
  std::swap(schedule.ranks[0][0], schedule.ranks[0][1]);  // the backward before its forward
  const PipelineIndex index = PipelineIndex::make(schedule).value_or_throw();
  const Status status = walk_pipeline(schedule, index, [](const PipelineVisit&) {});
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(status.error().message(), HasSubstr("rank 0, step 0 (0B0)"));
}

}  // namespace
}  // namespace cadre
