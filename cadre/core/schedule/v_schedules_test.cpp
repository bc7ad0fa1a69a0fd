// Compares the order of one rank with orders that were worked out by hand from the papers.
#include "cadre/core/schedule/v_schedules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace cadre {
namespace {

std::string text_of_order(const std::vector<PipelineAction>& actions) {
  std::string text;
  for (const PipelineAction& action : actions) text += (text.empty() ? "" : " ") + to_text(action);
  return text;
}

TEST(VSchedulesTest, ZbVFillsTheGapsOfTheEndWithWeightGradients) {
  EXPECT_EQ(text_of_order(zb_v_order({.rank = 0, .num_ranks = 2, .num_microbatches = 1})),
            "0F0 3F0 3I0 3W0 0I0 0W0");
  EXPECT_EQ(text_of_order(zb_v_order({.rank = 1, .num_ranks = 2, .num_microbatches = 1})),
            "1F0 2F0 2I0 2W0 1I0 1W0");
}

// The first of p ranks runs 2p - 1 forwards of its first stage before any other action. In this
// time the first microbatch passes all ranks and returns.
TEST(VSchedulesTest, ZbVBeginsWithAsManyForwardsAsTheWayThereAndBackIsLong) {
  for (const int num_ranks : {1, 2, 4}) {
    const auto actions =
        zb_v_order({.rank = 0, .num_ranks = num_ranks, .num_microbatches = 4 * num_ranks});
    const auto other = std::ranges::find_if(actions, [](const PipelineAction& action) {
      return action.kind != PipelineActionKind::kForward || action.stage != 0;
    });
    EXPECT_EQ(other - actions.begin(), 2 * num_ranks - 1);
    EXPECT_EQ(actions.size(), static_cast<size_t>(2 * 3 * 4 * num_ranks));
  }
}

TEST(VSchedulesTest, DualPipeVOverlapsForwardsWithBackwardsOfTheOtherStage) {
  EXPECT_EQ(text_of_order(dualpipe_v_order({.rank = 0, .num_ranks = 2, .num_microbatches = 4})),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 "
            "(3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3");
}

}  // namespace
}  // namespace cadre
