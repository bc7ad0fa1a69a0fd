#include "cadre/core/schedule/schedule_csv.h"

#include <gmock/gmock.h>

#include "cadre/core/schedule/lowering.h"
#include "cadre/testing/core/schedule_cases.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PipelineCsvTest, EveryScheduleIsReadAsItWasWritten) {
  const int count = for_each_pipeline([](const auto& options, const PipelineSchedule& schedule) {
    const auto again = parse_pipeline_csv(to_csv(schedule));
    ASSERT_TRUE(again.ok()) << text_of(options) << ": " << again.error().message();
    EXPECT_EQ(*again, schedule) << text_of(options);
  });
  EXPECT_GT(count, 1000);
}

TEST(PipelineCsvTest, TheLoweredFormToo) {
  const auto lowered =
      lower_pipeline(make(PipelineScheduleKind::kDualPipeV, 2, 4), {.max_unsharded_stages = 3})
          .value_or_throw();
  EXPECT_EQ(parse_pipeline_csv(to_csv(lowered)).value_or_throw(), lowered);
}

// Python's csv.writer writes this text: idle cells are empty, and a line of one idle cell is "".
TEST(PipelineCsvTest, IdleCellsAreSkipped) {
  const auto schedule = parse_pipeline_csv("0F0,,\"0B0\",\r\n,1F0,1B0\n").value_or_throw();
  EXPECT_EQ(to_csv(schedule), "0F0,0B0\r\n1F0,1B0\r\n");
  EXPECT_THAT(schedule.rank_of_stage, ElementsAre(0, 1));
  EXPECT_EQ(schedule.num_microbatches, 1);
  EXPECT_EQ(parse_pipeline_csv("\"\"\r\n0F0\r\n").value_or_throw().num_ranks(), 2);
}

TEST(PipelineCsvTest, TextThatIsNoScheduleIsRefusedWithItsPlace) {
  const auto message_of = [](std::string_view text) {
    const auto schedule = parse_pipeline_csv(text);
    return schedule.ok() ? "none" : schedule.error().message();
  };
  EXPECT_THAT(message_of(""), HasSubstr("the text is empty"));
  EXPECT_THAT(message_of("0F0,0B0\n1F0,,1X0\n"), HasSubstr("line 2, column 3: \"1X0\" is no"));
  EXPECT_THAT(message_of("0F0\n0B0\n"),
              HasSubstr("line 2: 0B0 is an action of stage 0, which line 1 has already"));
  EXPECT_THAT(message_of("0F0\n2F0\n"), HasSubstr("no line has an action of stage 1"));
  EXPECT_THAT(message_of(std::string(kMaxPipelineCsvBytes + 1, ',')), HasSubstr("at most"));
}

}  // namespace
}  // namespace cadre
