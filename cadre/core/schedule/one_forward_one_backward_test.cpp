// Compares the order of one rank with orders that were worked out by hand from the papers.
#include "cadre/core/schedule/one_forward_one_backward.h"

#include <gtest/gtest.h>

#include <string>

namespace cadre {
namespace {

std::string order_of(const OneForwardOneBackward& pipeline) {
  std::string text;
  for (const PipelineAction& action : one_forward_one_backward_order(pipeline)) {
    text += (text.empty() ? "" : " ") + to_text(action);
  }
  return text;
}

TEST(OneForwardOneBackwardTest, ARankWarmsUpWithOneForwardForEachFollowingRank) {
  EXPECT_EQ(order_of({.rank = 0, .num_ranks = 3, .num_microbatches = 4}),
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(order_of({.rank = 2, .num_ranks = 3, .num_microbatches = 4}),
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(OneForwardOneBackwardTest, WithFewMicrobatchesAllForwardsAreTheWarmUp) {
  EXPECT_EQ(order_of({.rank = 0, .num_ranks = 4, .num_microbatches = 2}), "0F0 0F1 0B0 0B1");
}

TEST(OneForwardOneBackwardTest, MicrobatchesTakeTurnsThroughTheStagesOfARank) {
  EXPECT_EQ(order_of({.rank = 1,
                      .num_ranks = 2,
                      .stages_per_rank = 2,
                      .num_microbatches = 4,
                      .microbatches_per_turn = 2,
                      .warmup_per_hop = 2}),
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

TEST(OneForwardOneBackwardTest, WeightGradientsFollowTheirInputGradientsAfterTheDelay) {
  EXPECT_EQ(order_of({.rank = 1, .num_ranks = 2, .num_microbatches = 3, .weight_grad_delay = 1}),
            "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
}

}  // namespace
}  // namespace cadre
