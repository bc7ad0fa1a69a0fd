#include "cadre/core/schedule/check.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "cadre/core/schedule/lowering.h"
#include "cadre/core/schedule/schedule_csv.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = PipelineScheduleKind;

std::string finding(const PipelineSchedule& schedule, const PipelineLimits& limits = {}) {
  const Status status = check_pipeline(schedule, limits);
  return status.ok() ? "none" : status.error().message();
}

std::string finding(std::string_view csv) {
  return finding(parse_pipeline_csv(csv).value_or_throw());
}

std::vector<PipelineAction>::iterator find(PipelineSchedule& schedule, int rank,
                                           std::string_view text) {
  auto& actions = schedule.ranks[rank];
  return std::ranges::find(actions, parse_pipeline_action(text).value_or_throw());
}

void erase(PipelineSchedule& schedule, int rank, std::string_view text) {
  schedule.ranks[rank].erase(find(schedule, rank, text));
}

void swap(PipelineSchedule& schedule, int rank, std::string_view a, std::string_view b) {
  std::iter_swap(find(schedule, rank, a), find(schedule, rank, b));
}

TEST(PipelineCheckTest, SwappedActionsAreADeadlock) {
  PipelineSchedule schedule = make(Kind::k1F1B, 2, 4);
  ASSERT_EQ(finding(schedule), "none");
  swap(schedule, 1, "1F2", "1F3");
  EXPECT_EQ(finding(schedule),
            "deadlock: each of these actions comes before an action that it needs: rank 0, step 6 "
            "(0B2) needs rank 1, step 5 (1B2); rank 1, step 5 (1B2) needs rank 1, step 6 (1F2)");
  schedule = make(Kind::kZbH1, 2, 3);
  swap(schedule, 1, "1I0", "1W0");
  EXPECT_THAT(finding(schedule), HasSubstr("rank 1, step 1 (1W0) needs rank 1, step 4 (1I0)"));
  schedule = make(Kind::k1F1B, 2, 4);
  swap(schedule, 1, "1F0", "1B0");
  EXPECT_THAT(finding(schedule), HasSubstr("rank 1, step 0 (1B0) needs rank 1, step 1 (1F0)"));
}

TEST(PipelineCheckTest, AMicrobatchThatDoesNotRunOnceIsNamed) {
  PipelineSchedule schedule = make(Kind::k1F1B, 4, 8);
  erase(schedule, 2, "2B5");
  EXPECT_EQ(finding(schedule),
            "rank 2: microbatch 5 has 2F5 on stage 2; expected 2F5 and either 2B5 or 2I5 and 2W5");
  schedule = make(Kind::k1F1B, 4, 8);
  schedule.ranks[3].push_back(*find(schedule, 3, "3F7"));
  EXPECT_EQ(finding(schedule),
            "rank 3, step 16 (3F7): 3F7 occurs already at rank 3, step 14 (3F7)");
  schedule = make(Kind::kZbH1, 4, 8);
  erase(schedule, 1, "1W7");
  EXPECT_THAT(finding(schedule), StartsWith("rank 1: microbatch 7 has 1F7 1I7 on stage 1"));
  schedule = make(Kind::kZbH1, 4, 8);
  schedule.ranks[1].push_back(parse_pipeline_action("1B7").value_or_throw());
  EXPECT_THAT(finding(schedule), StartsWith("rank 1: microbatch 7 has 1F7 1B7 1I7 1W7"));
  schedule = make(Kind::kGPipe, 4, 8);
  schedule.num_microbatches = 9;
  EXPECT_THAT(finding(schedule), StartsWith("rank 0: microbatch 8 has nothing on stage 0"));
}

TEST(PipelineCheckTest, AnActionThatDoesNotFitIsNamed) {
  PipelineSchedule schedule = make(Kind::kGPipe, 2, 2);
  schedule.rank_of_stage = {1, 0};
  EXPECT_EQ(finding(schedule), "rank 0, step 0 (0F0): stage 0 belongs to rank 1");
  schedule = make(Kind::kGPipe, 2, 2);
  schedule.ranks[0][1].stage = 2;
  EXPECT_EQ(finding(schedule), "rank 0, step 1 (2F1): there is no stage 2; the schedule has 2");
  schedule = make(Kind::kGPipe, 2, 2);
  schedule.ranks[0][1].microbatch = 2;
  EXPECT_EQ(finding(schedule),
            "rank 0, step 1 (0F2): there is no microbatch 2; the schedule has 2");
  schedule.ranks[0][1].microbatch = std::nullopt;
  EXPECT_EQ(finding(schedule), "rank 0, step 1 (0F): F needs the number of a microbatch");
  schedule = make(Kind::kGPipe, 2, 2);
  schedule.ranks[0][1].parts = {schedule.ranks[0][0]};
  EXPECT_THAT(finding(schedule), HasSubstr("rank 0, step 1 (0F1): has 1 parts"));
  schedule.ranks[0][1].kind = PipelineActionKind::kOverlap;
  EXPECT_THAT(finding(schedule), HasSubstr("has 1 parts; an overlap has two"));
  EXPECT_THAT(finding("0F0,(0F1;0B1)OVERLAP_F_B,0B0"),
              HasSubstr("rank 0, step 1 ((0F1;0B1)OVERLAP_F_B) needs rank 0, step 1"));
}

TEST(PipelineCheckTest, AScheduleWithoutAnythingToDoIsRefused) {
  const std::string needs = "; it needs at least one of each";
  EXPECT_EQ(finding(PipelineSchedule{}),
            "the schedule has 0 ranks, 0 stages and 0 microbatches" + needs);
  EXPECT_EQ(finding("\n"), "the schedule has 1 ranks, 0 stages and 0 microbatches" + needs);
  PipelineSchedule schedule{.ranks = {{}}, .rank_of_stage = {0}, .num_microbatches = -3};
  EXPECT_EQ(finding(schedule), "the schedule has 1 ranks, 1 stages and -3 microbatches" + needs);
  EXPECT_EQ(finding("0F0,0B0\n\n"), "rank 1 has no actions; every rank needs at least one stage");
}

TEST(PipelineCheckTest, AMessageThatIsNotSentAndReceivedOnceIsNamed) {
  const PipelineSchedule lowered = lower_pipeline(make(Kind::k1F1B, 2, 4), {}).value_or_throw();
  ASSERT_EQ(finding(lowered), "none");
  PipelineSchedule schedule = lowered;
  erase(schedule, 0, "0SEND_F2");
  EXPECT_EQ(finding(schedule), "rank 1, step 8 (1RECV_F2) needs 0SEND_F2, which no rank runs");
  schedule = lowered;
  erase(schedule, 1, "1RECV_F2");
  EXPECT_THAT(finding(schedule),
              AllOf(StartsWith("rank 0, step "), HasSubstr("(0SEND_F2): rank 1 has no 1RECV_F2")));
  schedule = lowered;
  swap(schedule, 1, "1RECV_F2", "1F2");
  EXPECT_THAT(finding(schedule), HasSubstr("rank 1, step 8 (1F2) needs rank 1, step 9 (1RECV_F2)"));
  schedule = lowered;
  swap(schedule, 0, "0F2", "0SEND_F2");
  EXPECT_THAT(finding(schedule), HasSubstr("(0SEND_F2) needs rank 0, step"));
  schedule = lowered;
  schedule.ranks[1].push_back(parse_pipeline_action("1SEND_F0").value_or_throw());
  EXPECT_THAT(finding(schedule), HasSubstr("(1SEND_F0): there is no stage 2 to send to"));
  schedule = lowered;
  schedule.ranks[0].push_back(parse_pipeline_action("0RECV_F0").value_or_throw());
  EXPECT_THAT(finding(schedule), HasSubstr("(0RECV_F0) needs -1SEND_F0, which no rank runs"));
  EXPECT_THAT(finding("0F0,0SEND_F0,1F0,1B0,0B0,2RECV_F0,2SEND_B0"), HasSubstr("microbatch 0 has"));
  EXPECT_THAT(finding("0F0,0SEND_F0,1F0,1B0,0B0"),
              HasSubstr("stage 1 is on the same rank; there is nothing to send"));
}

TEST(PipelineCheckTest, ParametersAndGradientsAreInOrder) {
  const PipelineSchedule lowered =
      lower_pipeline(make(Kind::kInterleaved1F1B, 2, 2), {.max_unsharded_stages = 1})
          .value_or_throw();
  ASSERT_EQ(finding(lowered), "none");
  PipelineSchedule schedule = lowered;
  erase(schedule, 0, "0UNSHARD");
  EXPECT_THAT(finding(schedule), HasSubstr("rank 0, step 0 (0F0): stage 0 is not unsharded here"));
  schedule = lowered;
  erase(schedule, 0, "0RESHARD");
  EXPECT_THAT(finding(schedule), HasSubstr("(0UNSHARD): stage 0 is unsharded already"));
  schedule = lowered;
  schedule.ranks[0].push_back(parse_pipeline_action("0RESHARD").value_or_throw());
  EXPECT_THAT(finding(schedule), HasSubstr("(0RESHARD): stage 0 is not unsharded"));
  schedule = lowered;
  swap(schedule, 0, "0REDUCE_GRAD", "0B0");
  EXPECT_THAT(finding(schedule), HasSubstr("(0REDUCE_GRAD): 0 of 2 microbatches have"));
  schedule = lowered;
  schedule.ranks[0].push_back(parse_pipeline_action("0REDUCE_GRAD").value_or_throw());
  EXPECT_THAT(finding(schedule), HasSubstr("(0REDUCE_GRAD): 2 of 2 microbatches have"));
}

TEST(PipelineCheckTest, ABoundOnLiveActivationsIsKept) {
  EXPECT_EQ(finding(make(Kind::k1F1B, 4, 8), {.max_live_activations = 4}), "none");
  EXPECT_EQ(finding(make(Kind::kGPipe, 4, 8), {.max_live_activations = 4}),
            "rank 0 keeps the activations of up to 8 microbatches; at most 4 are allowed");
}

// If 12 ranks wait, the message must list only eight of them.
TEST(PipelineCheckTest, ALongDeadlockIsShortened) {
  PipelineSchedule schedule = make(Kind::k1F1B, 12, 24);
  for (int rank = 0; rank < 12; ++rank) std::ranges::reverse(schedule.ranks[rank]);
  EXPECT_THAT(finding(schedule), HasSubstr("; and 4 more ranks wait"));
}

}  // namespace
}  // namespace cadre
