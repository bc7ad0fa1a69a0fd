#include "cadre/core/schedule/timeline_text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cadre/core/schedule/lowering.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using Kind = PipelineScheduleKind;

TEST(PipelineTimelineTest, ATableShowsWhenEachActionBegins) {
  const PipelineSchedule schedule = make(Kind::k1F1B, 2, 2);
  EXPECT_EQ(timeline_table(simulate_pipeline(schedule, {}).value_or_throw()),
            "ms  rank 0  rank 1\n"
            " 0  0F0     .\n"
            " 1  0F1     1F0\n"
            " 2  .       1B0\n"
            " 4  0B0     1F1\n"
            " 5  |       1B1\n"
            " 7  0B1     .\n");
  const auto lowered = lower_pipeline(schedule, {}).value_or_throw();
  EXPECT_EQ(timeline_table(simulate_pipeline(lowered, {.message_ms = 0.5}).value_or_throw()),
            " ms  rank 0             rank 1\n"
            "  0  0F0                1RECV_F0\n"
            "  1  0SEND_F0 0F1       .\n"
            "1.5  |                  1F0\n"
            "  2  0SEND_F1 0RECV_B0  |\n"
            "2.5  .                  1B0\n"
            "4.5  .                  1SEND_B0 1RECV_F1 1F1\n"
            "  5  0B0                |\n"
            "5.5  |                  1B1\n"
            "  7  0RECV_B1           |\n"
            "7.5  .                  1SEND_B1 1REDUCE_GRAD\n"
            "  8  0B1                .\n"
            " 10  0REDUCE_GRAD       .\n");
}

TEST(PipelineTimelineTest, ASummaryHasTheBubbleAndTheLiveActivationsOfEachRank) {
  const PipelineSchedule schedule = make(Kind::kZbV, 2, 4);
  EXPECT_EQ(timeline_summary(schedule, simulate_pipeline(schedule, {}).value_or_throw()),
            "step 25 ms; busiest rank 24 ms; bubble 4.0 % on average\n\n"
            "rank  stages  busy ms  bubble  live activations\n"
            "   0  0 3     24       4.0 %   4\n"
            "   1  1 2     24       4.0 %   4\n");
}

TEST(PipelineTimelineTest, JsonHasTheTimesOfEveryAction) {
  const auto lowered = lower_pipeline(make(Kind::kGPipe, 2, 1), {}).value_or_throw();
  const auto timeline = simulate_pipeline(lowered, {.message_ms = 0.5}).value_or_throw();
  const auto json = nlohmann::json::parse(timeline_json(lowered, timeline, "a \"b\""));
  EXPECT_EQ(json["title"], "a \"b\"");
  EXPECT_EQ(json["num_stages"], 2);
  EXPECT_EQ(json["num_microbatches"], 1);
  EXPECT_EQ(json["step_ms"], 7);
  ASSERT_EQ(json["ranks"].size(), 2U);
  const auto& rank = json["ranks"][1];
  EXPECT_EQ(rank["stages"], nlohmann::json({1}));
  EXPECT_EQ(rank["busy_ms"], 3);
  EXPECT_NEAR(rank["bubble_share"].get<double>(), 4.0 / 7, 1e-12);
  EXPECT_EQ(rank["live_activations"], 1);
  EXPECT_EQ(rank["actions"][0], nlohmann::json::parse(R"({"action": "1RECV_F0", "begin_ms": 0.0,
      "end_ms": 1.5, "computations": []})"));
  EXPECT_EQ(rank["actions"][2], nlohmann::json::parse(R"({"action": "1B0", "begin_ms": 2.5,
      "end_ms": 4.5, "computations": [{"kind": "B", "stage": 1, "microbatch": 0}]})"));
}

TEST(PipelineTimelineTest, JsonHasBothComputationsOfAnOverlap) {
  const PipelineSchedule schedule = make(Kind::kDualPipeV, 3, 8);
  const auto json = nlohmann::json::parse(
      timeline_json(schedule, simulate_pipeline(schedule, {}).value_or_throw(), ""));
  size_t num_overlaps = 0;
  for (size_t rank = 0; rank < 3; ++rank) {
    for (size_t i = 0; i < schedule.ranks[rank].size(); ++i) {
      const bool is_overlap = schedule.ranks[rank][i].kind == PipelineActionKind::kOverlap;
      num_overlaps += is_overlap ? 1 : 0;
      EXPECT_EQ(json["ranks"][rank]["actions"][i]["computations"].size(), is_overlap ? 2U : 1U);
    }
  }
  EXPECT_GT(num_overlaps, 0U);
}

}  // namespace
}  // namespace cadre
