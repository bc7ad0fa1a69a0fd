#include "cadre/core/schedule/partition.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "cadre/core/base/random.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

double largest_stage(std::span<const double> costs, std::span<const size_t> begins) {
  double largest = 0;
  for (size_t stage = 0; stage + 1 < begins.size(); ++stage) {
    const auto layers = costs.subspan(begins[stage], begins[stage + 1] - begins[stage]);
    largest = std::max(largest, std::accumulate(layers.begin(), layers.end(), 0.0));
  }
  return largest;
}

// Tries every split, and returns the smallest value of the largest cost of a stage.
double best_of_all(std::span<const double> costs, size_t num_stages) {
  if (num_stages == 1) return std::accumulate(costs.begin(), costs.end(), 0.0);
  double best = std::numeric_limits<double>::infinity();
  double first = 0;
  for (size_t length = 1; length + num_stages - 1 <= costs.size(); ++length) {
    first += costs[length - 1];
    best = std::min(best, std::max(first, best_of_all(costs.subspan(length), num_stages - 1)));
  }
  return best;
}

TEST(SplitLayersTest, NoOtherSplitHasASmallerLargestStage) {
  Random random(7);
  for (int round = 0; round < 300; ++round) {
    const size_t num_layers = 1 + random.below(10);
    const size_t num_stages = 1 + random.below(num_layers);
    std::vector<double> costs(num_layers);
    // The costs are integers, so that their sums are exact.
    for (double& cost : costs) cost = static_cast<double>(random.below(9));
    const auto begins = split_layers(costs, static_cast<int>(num_stages)).value_or_throw();
    ASSERT_EQ(begins.size(), num_stages + 1);
    EXPECT_EQ(begins.front(), 0U);
    EXPECT_EQ(begins.back(), num_layers);
    for (size_t stage = 0; stage < num_stages; ++stage) EXPECT_LT(begins[stage], begins[stage + 1]);
    EXPECT_EQ(largest_stage(costs, begins), best_of_all(costs, num_stages)) << "round " << round;
  }
}

TEST(SplitLayersTest, AnEmbeddingAndAHeadTakeBlocksFromTheirStages) {
  const std::vector<double> costs{3, 1, 1, 1, 1, 1, 1, 1, 1, 4};
  EXPECT_THAT(*split_layers(costs, 4), ElementsAre(0, 2, 5, 9, 10));
}

TEST(SplitLayersTest, ImpossibleSplitsAreRefused) {
  const std::vector<double> costs{1, -1};
  EXPECT_THAT(split_layers(costs, 3).error().message(), HasSubstr("2 layers for 3 stages"));
  EXPECT_THAT(split_layers(costs, 0).error().message(), HasSubstr("2 layers for 0 stages"));
  EXPECT_THAT(split_layers(costs, 2).error().message(), HasSubstr("layer 1 has the cost -1"));
  const std::vector<double> infinite{std::numeric_limits<double>::infinity()};
  EXPECT_FALSE(split_layers(infinite, 1).ok());
}

}  // namespace
}  // namespace cadre
