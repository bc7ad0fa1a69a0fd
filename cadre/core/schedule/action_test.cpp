#include "cadre/core/schedule/action.h"

#include <gmock/gmock.h>

namespace cadre {
namespace {

using ::testing::HasSubstr;

TEST(PipelineActionTest, EveryKindIsPrintedAsPyTorchDoesAndReadAgain) {
  for (const std::string text :
       {"2F0", "11B3", "0I15", "7W1", "1UNSHARD", "12RESHARD", "3SEND_F1", "3RECV_F1", "3SEND_B1",
        "3RECV_B10", "4REDUCE_GRAD", "(0F3;7B0)OVERLAP_F_B", "(0F3;7I0)OVERLAP_F_B"}) {
    const auto action = parse_pipeline_action(text);
    ASSERT_TRUE(action.ok()) << action.error().message();
    EXPECT_EQ(to_text(*action), text);
  }
  EXPECT_EQ(
      *parse_pipeline_action("3SEND_F1"),
      (PipelineAction{.kind = PipelineActionKind::kSendForward, .stage = 3, .microbatch = 1}));
  EXPECT_EQ(*parse_pipeline_action(" (0F3; 7B0)OVERLAP_F_B\r"),
            (PipelineAction{
                .kind = PipelineActionKind::kOverlap,
                .parts = {{.kind = PipelineActionKind::kForward, .stage = 0, .microbatch = 3},
                          {.kind = PipelineActionKind::kBackward, .stage = 7, .microbatch = 0}}}));
}

TEST(PipelineActionTest, WhatIsNoActionIsRefusedWithItsText) {
  for (const std::string text : {"",
                                 "F0",
                                 "2",
                                 "2F",
                                 "2F0x",
                                 "2G0",
                                 "-1F0",
                                 "2F-1",
                                 "1UNSHARD3",
                                 "65536F0",
                                 "0F1048576",
                                 "0F99999999999999999999",
                                 "(0F3)OVERLAP_F_B",
                                 "(0F3;7B0)",
                                 "(0F3;7B0)F",
                                 "0OVERLAP_F_B",
                                 "(0B3;7F0)OVERLAP_F_B",
                                 "(0F3;7B0;1B0)OVERLAP_F_B",
                                 "((0F3;7B0)OVERLAP_F_B;1B0)OVERLAP_F_B",
                                 "(0F3;7W0)OVERLAP_F_B",
                                 ";)(",
                                 "2F 0",
                                 "2f0"}) {
    const auto action = parse_pipeline_action(text);
    ASSERT_FALSE(action.ok()) << text;
    EXPECT_EQ(action.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(action.error().message(), HasSubstr("is no action of a pipeline schedule"));
  }
  EXPECT_THAT(parse_pipeline_action("2G0").error().message(), HasSubstr("\"2G0\""));
  EXPECT_THAT(parse_pipeline_action(std::string(1000, '7')).error().message(),
              HasSubstr(std::string(60, '7') + "...\""));
}

TEST(PipelineActionTest, KindsAreGrouped) {
  EXPECT_TRUE(is_computation(PipelineActionKind::kWeightGrad));
  EXPECT_FALSE(is_computation(PipelineActionKind::kUnshard));
  EXPECT_TRUE(is_message(PipelineActionKind::kSendForward) &&
              is_message(PipelineActionKind::kRecvBackward));
  EXPECT_FALSE(is_message(PipelineActionKind::kReshard) ||
               is_message(PipelineActionKind::kReduceGrad));
  EXPECT_FALSE(has_microbatch(PipelineActionKind::kOverlap));
}

}  // namespace
}  // namespace cadre
