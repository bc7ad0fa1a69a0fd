#include "cadre/core/os/native/monotonic_clock.h"

#include <gtest/gtest.h>

#include <chrono>

namespace cadre::os {
namespace {

TEST(MonotonicClock, ATimespecHasWholeSecondsAndTheRest) {
  const timespec time = to_timespec(std::chrono::nanoseconds(3'000'000'007));
  EXPECT_EQ(time.tv_sec, 3);
  EXPECT_EQ(time.tv_nsec, 7);
  EXPECT_EQ(to_timespec({}).tv_sec, 0);
}

TEST(MonotonicClock, ASleepEndsAtItsDeadlineOrAtOnce) {
  const TimePoint begin = monotonic_now();
  sleep_until(Deadline(begin + std::chrono::milliseconds(3)));
  EXPECT_GE(monotonic_now() - begin, std::chrono::milliseconds(3));
  sleep_until(Deadline(begin));
}

}  // namespace
}  // namespace cadre::os
