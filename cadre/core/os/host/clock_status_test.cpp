#include "cadre/core/os/host/clock_status.h"

#include <gtest/gtest.h>

namespace cadre::os {
namespace {

TEST(ClockStatus, AJumpIsTheDifferenceOfBothAdvances) {
  const ClockReading before{.monotonic = TimePoint{5'000}, .wall_ns = 1'000'000};
  EXPECT_EQ(wall_clock_jump(before, {TimePoint{6'000}, 1'001'000}), Duration(0));
  EXPECT_EQ(wall_clock_jump(before, {TimePoint{6'000}, 1'301'000}), Duration(300'000));
  EXPECT_EQ(wall_clock_jump(before, {TimePoint{6'000}, 1'000'500}), Duration(-500));
}

TEST(ClockStatus, ReadsThisHost) {
  const ClockReading before = read_clocks();
  EXPECT_GT(measure_clock_read(), Duration(0));
  const ClockReading after = read_clocks();
  EXPECT_GT(after.monotonic, before.monotonic);
  if (const auto sync = read_wall_clock_sync()) {
    EXPECT_GE(sync->max_error, Duration(0));
  }
}

}  // namespace
}  // namespace cadre::os
