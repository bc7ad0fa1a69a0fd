#include "cadre/launch/cli/tune/crossing.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "cadre/core/base/random.h"

namespace cadre::cli {
namespace {

// The times of algorithms with a latency and a bandwidth, at sizes of powers of two from 1 KiB to
// 16 MiB.
struct Line {
  double latency_us;
  double bytes_per_us;
  double at(uint64_t num_bytes) const {
    return latency_us + static_cast<double>(num_bytes) / bytes_per_us;
  }
};

std::vector<TimedSize> times_of(const Line& first, const Line& second) {
  std::vector<TimedSize> times;
  for (uint64_t size = 1 << 10; size <= 16 << 20; size *= 2) {
    times.push_back({size, first.at(size), second.at(size)});
  }
  return times;
}

TEST(Crossing, IsTheFirstSizeAtWhichTheFormulasSayThatTheSecondIsFaster) {
  for (const auto& [first, second] : {std::pair{Line{20, 500}, Line{60, 2000}},
                                      {Line{50, 100}, Line{400, 1000}},
                                      {Line{10, 50}, Line{2000, 800}}}) {
    const auto times = times_of(first, second);
    // latency + n / bandwidth is equal for both at this size.
    const double crossing =
        (second.latency_us - first.latency_us) / (1 / first.bytes_per_us - 1 / second.bytes_per_us);
    uint64_t expected = 1 << 10;
    while (static_cast<double>(expected) < crossing) expected *= 2;
    const auto chosen = crossing_of(times);
    ASSERT_TRUE(chosen);
    // Both are equally good within the margin, and the smallest size counts.
    EXPECT_LE(*chosen, expected);
    EXPECT_LE(second.at(*chosen), first.at(*chosen) * (1 + kTimeMargin));
    EXPECT_GT(second.at(*chosen / 2), first.at(*chosen / 2) * (1 + kTimeMargin));
  }
}

TEST(Crossing, AnAlgorithmThatIsAlwaysBetterIsAlwaysChosen) {
  const Line fast{10, 1000}, slow{20, 500};
  EXPECT_EQ(crossing_of(times_of(fast, slow)), uint64_t{32} << 20);
  EXPECT_EQ(crossing_of(times_of(slow, fast)), uint64_t{1} << 10);
}

TEST(Crossing, DifferencesWithinTheMarginGiveNoChoice) {
  EXPECT_FALSE(crossing_of({}));
  std::vector<TimedSize> times = times_of({10, 1000}, {10, 1000});
  for (size_t i = 0; i < times.size(); ++i) times[i].second_us *= i % 2 == 0 ? 1.045 : 0.955;
  EXPECT_FALSE(crossing_of(times));
}

TEST(Crossing, OneWrongMeasurementDoesNotMoveIt) {
  const Line first{20, 500}, second{60, 2000};
  const auto right = crossing_of(times_of(first, second));
  ASSERT_TRUE(right);
  for (size_t i = 0; i < times_of(first, second).size(); ++i) {
    auto times = times_of(first, second);
    // Makes the slower algorithm of this size the faster one by 10%.
    const bool is_first_slow = times[i].first_us > times[i].second_us;
    double& slow = is_first_slow ? times[i].first_us : times[i].second_us;
    slow = 0.9 * (is_first_slow ? times[i].second_us : times[i].first_us);
    const bool is_neighbour = times[i].num_bytes == *right || 2 * times[i].num_bytes == *right;
    if (!is_neighbour) {
      EXPECT_EQ(crossing_of(times), right) << "size " << times[i].num_bytes;
    }
  }
}

TEST(Crossing, NoiseWithinTheMarginMovesItByNoMoreThanTheEquallyGoodSizes) {
  const Line first{20, 500}, second{60, 2000};
  Random random(1);
  for (int round = 0; round < 1000; ++round) {
    auto times = times_of(first, second);
    for (TimedSize& time : times) {
      time.first_us *= 0.98 + 0.04 * static_cast<double>(random.below(1001)) / 1000;
      time.second_us *= 0.98 + 0.04 * static_cast<double>(random.below(1001)) / 1000;
    }
    const auto chosen = crossing_of(times);
    ASSERT_TRUE(chosen);
    EXPECT_LE(second.at(*chosen), first.at(*chosen) * 1.1);
    EXPECT_GT(second.at(*chosen / 2) * 1.1, first.at(*chosen / 2));
  }
}

// The reference adds up the cost of each possible choice.
TEST(Crossing, HasTheLeastCostOfAllChoices) {
  Random random(2);
  const auto cost = [](double chosen, double other) {
    return std::max(0.0, chosen / other - 1 - kTimeMargin);
  };
  for (int round = 0; round < 1000; ++round) {
    std::vector<TimedSize> times;
    for (uint64_t size = 4; size <= 4096; size *= 4) {
      times.push_back({size, 1.0 + static_cast<double>(random.below(100)),
                       1.0 + static_cast<double>(random.below(100))});
    }
    const auto cost_from = [&](uint64_t crossing) {
      double sum = 0;
      for (const TimedSize& time : times) {
        sum += time.num_bytes < crossing ? cost(time.first_us, time.second_us)
                                         : cost(time.second_us, time.first_us);
      }
      return sum;
    };
    const auto chosen = crossing_of(times);
    ASSERT_TRUE(chosen);
    for (uint64_t other = 4; other <= 4 * 4096; other *= 4) {
      EXPECT_LE(cost_from(*chosen), cost_from(other) + 1e-9);
    }
  }
}

}  // namespace
}  // namespace cadre::cli
