#include "cadre/core/base/random.h"

#include <gtest/gtest.h>

#include <array>

namespace cadre {
namespace {

// This is the published sequence of SplitMix64 with the seed 1234567.
TEST(Random, GivesTheSequenceOfSplitMix64) {
  Random random(1234567);
  for (const uint64_t expected :
       {6457827717110365317ULL, 3203168211198807973ULL, 9817491932198370423ULL,
        4593380528125082431ULL, 16408922859458223821ULL}) {
    EXPECT_EQ(random.next(), expected);
  }
}

TEST(Random, NumbersBelowABoundReachAllOfThem) {
  Random random(7);
  std::array<int, 6> counts{};
  constexpr int kDraws = 6000;
  for (int i = 0; i < kDraws; ++i) ++counts.at(random.below(counts.size()));
  for (const int count : counts) {
    EXPECT_GT(count, 800);
    EXPECT_LT(count, 1200);
  }
  EXPECT_EQ(random.below(1), 0u);
}

TEST(Random, UnitsAreInTheirIntervalAndSpread) {
  Random random(8);
  double sum = 0;
  constexpr int kDraws = 10000;
  for (int i = 0; i < kDraws; ++i) {
    const double unit = random.unit();
    ASSERT_GE(unit, 0.0);
    ASSERT_LT(unit, 1.0);
    sum += unit;
  }
  EXPECT_NEAR(sum / kDraws, 0.5, 0.02);
}

}  // namespace
}  // namespace cadre
