#include "cadre/core/fabric/bootstrap/sponsors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

#include "cadre/core/base/random.h"

namespace cadre {
namespace {

// Distributes the ranks over hosts at random.
Layout scattered_layout(uint64_t seed, int num_ranks, int num_hosts) {
  Random random(seed);
  std::vector<wire::RankAddress> rank_addresses(static_cast<size_t>(num_ranks));
  for (wire::RankAddress& rank_address : rank_addresses) {
    rank_address.boot_id = std::to_string(random.below(static_cast<uint64_t>(num_hosts)));
  }
  return Layout(std::move(rank_addresses));
}

TEST(Sponsors, MakeATreeOfLogarithmicDepthWithRank0AtItsRoot) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Layout layout =
        scattered_layout(seed, static_cast<int>(1 + seed * 3), static_cast<int>(1 + seed / 2));
    const int num_steps = std::bit_width(static_cast<unsigned>(layout.num_hosts() - 1)) + 1;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
      int depth = 0;
      for (int at = rank; at != 0 && depth <= num_steps; ++depth) at = sponsor_of(layout, at);
      EXPECT_LE(depth, num_steps) << "rank " << rank << ", seed " << seed;
      EXPECT_EQ(depth_of(layout, rank), depth) << "rank " << rank << ", seed " << seed;
    }
    EXPECT_EQ(sponsor_of(layout, 0), -1);
  }
}

TEST(Sponsors, BothEndsAgreeOnEachEdgeAndHeightsGrowUpwards) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const Layout layout =
        scattered_layout(seed, static_cast<int>(1 + seed * 3), static_cast<int>(1 + seed / 2));
    int num_edges = 0;
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
      for (const int below : sponsored_by(layout, rank)) {
        EXPECT_EQ(sponsor_of(layout, below), rank) << "seed " << seed;
        EXPECT_LT(height_of(layout, below), height_of(layout, rank)) << "seed " << seed;
        ++num_edges;
      }
    }
    EXPECT_EQ(num_edges, layout.num_ranks() - 1) << "seed " << seed;
  }
}

TEST(Sponsors, OfOneHostAllHaveItsLowestRank) {
  std::vector<wire::RankAddress> rank_addresses(5);
  rank_addresses[0].boot_id = "other";
  const Layout layout(std::move(rank_addresses));
  EXPECT_EQ(sponsored_by(layout, 0), (std::vector<int>{1}));
  EXPECT_EQ(sponsored_by(layout, 1), (std::vector<int>{2, 3, 4}));
  EXPECT_EQ(sponsored_by(layout, 3), (std::vector<int>{}));
  EXPECT_EQ(leader_of(layout, 4), 1);
  EXPECT_EQ(height_of(layout, 0), 2);
}

// There are 8 hosts with one rank each. Rank 0 sponsors ranks 4, 2 and 1; rank 4 sponsors 6 and 5;
// rank 6 sponsors 7; rank 2 sponsors 3. sponsored_by() must list the largest subtrees first.
TEST(Sponsors, TheRankWithTheMostBelowItIsServedFirst) {
  std::vector<wire::RankAddress> rank_addresses(8);
  for (size_t i = 0; i < rank_addresses.size(); ++i) rank_addresses[i].boot_id = std::to_string(i);
  const Layout layout(std::move(rank_addresses));
  EXPECT_EQ(sponsored_by(layout, 0), (std::vector<int>{4, 2, 1}));
  EXPECT_EQ(sponsored_by(layout, 4), (std::vector<int>{6, 5}));
  EXPECT_EQ(sponsored_by(layout, 6), (std::vector<int>{7}));
  EXPECT_EQ(sponsored_by(layout, 7), (std::vector<int>{}));
}

}  // namespace
}  // namespace cadre
