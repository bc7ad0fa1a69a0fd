#include <gmock/gmock.h>

#include "cadre/core/schedule/lowering.h"
#include "cadre/core/schedule/timeline_svg.h"
#include "cadre/core/schedule/timeline_text.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Kind = PipelineScheduleKind;

size_t count(std::string_view text, std::string_view word) {
  size_t number = 0;
  for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) ++number;
  return number;
}

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

TEST(PipelineTimelineTest, APictureHasABoxForEachComputation) {
  const PipelineSchedule schedule = make(Kind::kDualPipeV, 3, 8);
  const PipelineTimeline timeline = simulate_pipeline(schedule, {}).value_or_throw();
  const std::string svg = timeline_svg(schedule, timeline, "a & <b>");
  EXPECT_THAT(svg, HasSubstr("a &amp; &lt;b&gt;"));
  EXPECT_THAT(svg, HasSubstr("OVERLAP_F_B: "));
  size_t num_computations = 0;
  for (const auto& actions : schedule.ranks) {
    for (const PipelineAction& action : actions) num_computations += leaves_of(action).size();
  }
  EXPECT_EQ(count(svg, "</title></rect>"), num_computations);
  EXPECT_EQ(count(svg, "bubble "), 3U);
  // Neither messages nor a length of 0 make boxes.
  const auto lowered = lower_pipeline(schedule, {}).value_or_throw();
  const std::string lowered_svg =
      timeline_svg(lowered, simulate_pipeline(lowered, {}).value_or_throw(), "");
  EXPECT_EQ(count(lowered_svg, "</title></rect>"), num_computations);
  EXPECT_THAT(timeline_svg({}, {}, ""), Not(HasSubstr("nan")));
}

// The step is too short for any number of pixels per millisecond to make it visible.
TEST(PipelineTimelineTest, APictureOfAnExtremelyShortStepHasNoScale) {
  const PipelineSchedule schedule = make(Kind::kGPipe, 2, 2);
  const PipelineCosts costs{.stages = {{1e-310, 0, 0, 0}, {1e-310, 0, 0, 0}}};
  const std::string svg =
      timeline_svg(schedule, simulate_pipeline(schedule, costs).value_or_throw(), "");
  EXPECT_LT(svg.size(), 10'000U);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

}  // namespace
}  // namespace cadre
