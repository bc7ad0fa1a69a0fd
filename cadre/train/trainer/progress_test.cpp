#include "cadre/train/trainer/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

TEST(StepLine, TheSpeedHasTwoDigitsAtLeast) {
  const auto line = [](double items_per_second) {
    StepReport step{.step = 1, .num_steps = 20};
    step.items_per_second = items_per_second;
    step.item_name = "samples";
    return step_line(step);
  };
  EXPECT_THAT(line(0.43), HasSubstr("  0.43 samples/s  "));
  EXPECT_THAT(line(4.26), HasSubstr("  4.3 samples/s  "));
  EXPECT_THAT(line(43.4), HasSubstr("  43 samples/s  "));
  EXPECT_THAT(line(243.4), HasSubstr("  243 samples/s  "));
  EXPECT_THAT(line(1540), HasSubstr("  1.5k samples/s  "));
  EXPECT_THAT(line(35140), HasSubstr("  35.1k samples/s  "));
}

// Operations of two groups overlap, and each takes the whole step; the result must not exceed 1.
TEST(CommunicationShare, IsAtMostTheStep) {
  using std::chrono::milliseconds;
  EXPECT_EQ(communication_share(milliseconds(25), milliseconds(100)), 0.25);
  EXPECT_EQ(communication_share(milliseconds(200), milliseconds(100)), 1);
  EXPECT_EQ(communication_share(milliseconds(1), milliseconds(0)), 0);
}

}  // namespace
}  // namespace cadre::train
