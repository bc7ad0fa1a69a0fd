#include "cadre/core/collective/hierarchical/host_map.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

TEST(HostMapTest, HostsAreInTheOrderOfTheirLowestRanks) {
  const std::vector<int> names = {7, 3, 7, 9, 3, 7};
  const HostMap hosts(names);
  EXPECT_EQ(hosts.num_ranks(), 6);
  EXPECT_EQ(hosts.num_hosts(), 3);
  EXPECT_EQ(hosts.ranks_of(0), (std::vector<Rank>{0, 2, 5}));
  EXPECT_EQ(hosts.ranks_of(1), (std::vector<Rank>{1, 4}));
  EXPECT_EQ(hosts.ranks_of(2), (std::vector<Rank>{3}));
  EXPECT_EQ(hosts.host_of(4), 1);
  EXPECT_EQ(hosts.index_of(4), 1);
  EXPECT_EQ(hosts.index_of(5), 2);
  EXPECT_EQ(hosts.fewest_ranks(), 1);
  EXPECT_EQ(hosts.most_ranks(), 3);
  EXPECT_EQ(hosts.column(0), (std::vector<Rank>{0, 1, 3}));
  EXPECT_EQ(hosts.in_host_order(), (std::vector<Rank>{0, 2, 5, 1, 4, 3}));
  EXPECT_FALSE(hosts.is_in_host_order());
}

TEST(HostMapTest, ConsecutiveRanksAreInHostOrder) {
  const std::vector<int> names = {0, 0, 1, 1};
  const HostMap hosts(names);
  EXPECT_TRUE(hosts.is_in_host_order());
  EXPECT_EQ(hosts.fewest_ranks(), 2);
  EXPECT_EQ(hosts.column(1), (std::vector<Rank>{1, 3}));
}

}  // namespace
}  // namespace cadre
