#include "cadre/core/schedule/lowering.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>

#include "cadre/core/schedule/check.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/core/schedule/simulate.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using Kind = PipelineScheduleKind;

PipelineSchedule computations_of(PipelineSchedule schedule) {
  for (auto& actions : schedule.ranks) {
    std::erase_if(actions, [](const PipelineAction& action) {
      return !is_computation(action.kind) && action.kind != PipelineActionKind::kOverlap;
    });
  }
  return schedule;
}

TEST(PipelineLoweringTest, EveryScheduleIsLoweredToOneThatRuns) {
  constexpr std::array kLowerings{
      PipelineLowering{}, PipelineLowering{.max_unsharded_stages = 1, .reduces_gradients = false},
      PipelineLowering{.receives = ReceivePlacement::kAsSent, .max_unsharded_stages = 3}};
  for_each_pipeline([&](const auto& options, const PipelineSchedule& schedule) {
    for (const PipelineLowering& lowering : kLowerings) {
      const auto lowered = lower_pipeline(schedule, lowering);
      ASSERT_TRUE(lowered.ok()) << text_of(options) << ": " << lowered.error().message();
      const Status status = check_pipeline(*lowered);
      ASSERT_TRUE(status.ok()) << text_of(options) << ": " << status.error().message();
      EXPECT_EQ(computations_of(*lowered), schedule) << text_of(options);
    }
  });
}

// A receive that blocks directly before the use of its message causes no delay. A receive at the
// time of its send may cause one.
TEST(PipelineLoweringTest, ReceivesBeforeUseKeepTheLengthOfTheStep) {
  const PipelineCosts costs{.message_ms = 0.25};
  for_each_pipeline([&](const auto& options, const PipelineSchedule& schedule) {
    const double plain = simulate_pipeline(schedule, costs)->makespan_ms;
    const auto before_use = lower_pipeline(schedule, {}).value_or_throw();
    EXPECT_EQ(simulate_pipeline(before_use, costs)->makespan_ms, plain) << text_of(options);
    const auto as_sent =
        lower_pipeline(schedule, {.receives = ReceivePlacement::kAsSent}).value_or_throw();
    EXPECT_GE(simulate_pipeline(as_sent, costs)->makespan_ms, plain) << text_of(options);
  });
}

TEST(PipelineLoweringTest, ASmallScheduleHasItsMessages) {
  const auto schedule = make(Kind::k1F1B, 2, 2);
  EXPECT_EQ(to_csv(lower_pipeline(schedule, {}).value_or_throw()),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\r\n");
  EXPECT_EQ(to_csv(lower_pipeline(schedule, {.receives = ReceivePlacement::kAsSent,
                                             .max_unsharded_stages = 3,
                                             .reduces_gradients = false})
                       .value_or_throw()),
            "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0RESHARD\r\n"
            "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1RESHARD\r\n");
}

// The two stages at the turn of a V schedule are on one rank, so no message may be sent between
// them.
TEST(PipelineLoweringTest, StagesOfOneRankExchangeNothing) {
  const auto lowered = lower_pipeline(make(Kind::kZbV, 2, 1), {}).value_or_throw();
  EXPECT_EQ(to_csv(lowered),
            "0F0,0SEND_F0,3RECV_F0,3F0,3I0,3SEND_B0,3W0,3REDUCE_GRAD,0RECV_B0,0I0,0W0,0REDUCE_GRAD"
            "\r\n1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2I0,2W0,2REDUCE_GRAD,1I0,1SEND_B0,1W0,"
            "1REDUCE_GRAD\r\n");
}

TEST(PipelineLoweringTest, AtMostSoManyStagesAreUnsharded) {
  const auto schedule = make_pipeline_schedule({Kind::kInterleaved1F1B, 2, 4, 4}).value_or_throw();
  for (int limit = 1; limit <= 5; ++limit) {
    const auto lowered = lower_pipeline(schedule, {.max_unsharded_stages = limit}).value_or_throw();
    for (const auto& actions : lowered.ranks) {
      int unsharded = 0;
      int peak = 0;
      for (const PipelineAction& action : actions) {
        unsharded += action.kind == PipelineActionKind::kUnshard ? 1 : 0;
        unsharded -= action.kind == PipelineActionKind::kReshard ? 1 : 0;
        peak = std::max(peak, unsharded);
      }
      EXPECT_EQ(peak, std::min(limit, 4));
      EXPECT_EQ(unsharded, 0);
    }
  }
}

TEST(PipelineLoweringTest, WhatCannotBeLoweredIsRefused) {
  const auto lowered = lower_pipeline(make(Kind::k1F1B, 2, 2), {}).value_or_throw();
  EXPECT_EQ(lower_pipeline(lowered, {}).error().message(),
            "rank 0, step 1 (0SEND_F0): only schedules of F, B, I, W and OVERLAP_F_B can be "
            "lowered; this one is lowered already");
  EXPECT_THAT(
      lower_pipeline(make(Kind::k1F1B, 2, 2), {.max_unsharded_stages = 0}).error().message(),
      HasSubstr("max_unsharded_stages is 0"));
  PipelineSchedule broken = make(Kind::k1F1B, 2, 2);
  std::swap(broken.ranks[1][0], broken.ranks[1][1]);
  EXPECT_THAT(lower_pipeline(broken, {}).error().message(), HasSubstr("deadlock"));
}

}  // namespace
}  // namespace cadre
