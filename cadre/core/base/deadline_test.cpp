#include "cadre/core/base/deadline.h"

#include <gtest/gtest.h>

#include <limits>

namespace cadre {
namespace {

using std::chrono::nanoseconds;

constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
constexpr int64_t kFirst = std::numeric_limits<int64_t>::min();

TEST(TimePoint, AddsAndSubtractsDurations) {
  EXPECT_EQ(TimePoint{100} + nanoseconds(20), TimePoint{120});
  EXPECT_EQ(TimePoint{100} + nanoseconds(-20), TimePoint{80});
  EXPECT_EQ(TimePoint{100} - TimePoint{120}, nanoseconds(-20));
}

// Callers that want no limit pass Duration::max(), so `now + timeout` must saturate.
TEST(TimePoint, StopsAtTheEndsOfItsRange) {
  EXPECT_EQ((TimePoint{5} + Duration::max()), TimePoint{kLast});
  EXPECT_EQ((TimePoint{kLast} + nanoseconds(1)), TimePoint{kLast});
  EXPECT_EQ((TimePoint{-5} + Duration::min()), TimePoint{kFirst});
  EXPECT_EQ((TimePoint{kLast} - TimePoint{-1}), Duration::max());
  EXPECT_EQ((TimePoint{kFirst} - TimePoint{1}), Duration::min());
}

// std::chrono's own conversion of seconds::max() to nanoseconds overflows to a negative duration,
// and a call with this timeout would not wait at all. to_duration() must saturate instead.
TEST(Duration, OfCoarserUnitsStopsAtTheEndsOfItsRange) {
  EXPECT_EQ(to_duration(std::chrono::seconds(3)), std::chrono::seconds(3));
  EXPECT_EQ(to_duration(std::chrono::duration<int32_t>(-3)), std::chrono::seconds(-3));
  EXPECT_EQ(to_duration(std::chrono::seconds::max()), Duration::max());
  EXPECT_EQ(to_duration(std::chrono::hours::max()), Duration::max());
  EXPECT_EQ(to_duration(std::chrono::seconds::min()), Duration::min());
  EXPECT_EQ(to_duration(Duration::max()), Duration::max());
}

TEST(Deadline, HasPassedFromItsTimeOn) {
  constexpr Deadline deadline(TimePoint{100});
  EXPECT_FALSE(deadline.has_passed(TimePoint{99}));
  EXPECT_TRUE(deadline.has_passed(TimePoint{100}));
  EXPECT_EQ(deadline.remaining(TimePoint{60}), nanoseconds(40));
  EXPECT_EQ(deadline.remaining(TimePoint{100}), Duration::zero());
  EXPECT_EQ(deadline.remaining(TimePoint{200}), Duration::zero());
}

TEST(Deadline, WithoutALimitHasNotPassedAndLeavesTheLongestTime) {
  const Deadline never(TimePoint{1000} + Duration::max());
  EXPECT_FALSE(never.has_passed(TimePoint{kLast - 1}));
  EXPECT_EQ(never.remaining(TimePoint{-1}), Duration::max());
}

TEST(Deadline, TheEarlierOfTwoWins) {
  constexpr Deadline early(TimePoint{1});
  constexpr Deadline late(TimePoint{2});
  EXPECT_EQ(early.earlier(late), early);
  EXPECT_EQ(late.earlier(early), early);
  EXPECT_LT(early, late);
}

}  // namespace
}  // namespace cadre
