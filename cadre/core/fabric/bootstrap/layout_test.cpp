#include "cadre/core/fabric/bootstrap/layout.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Returns the layout of ranks whose hosts have these boot ids.
Layout layout_of_boots(const std::vector<std::string>& boot_ids) {
  std::vector<wire::RankAddress> addresses;
  for (const std::string& boot_id : boot_ids) {
    wire::RankAddress address;
    address.host = "host-" + boot_id;
    address.boot_id = boot_id;
    address.pid = 100 + static_cast<int32_t>(addresses.size());
    addresses.push_back(std::move(address));
  }
  return Layout(std::move(addresses));
}

TEST(Layout, HostsAreNumberedInTheOrderOfTheirLowestRanks) {
  const Layout layout = layout_of_boots({"b", "a", "b", "c", "a"});
  EXPECT_EQ(layout.num_ranks(), 5);
  EXPECT_EQ(layout.num_hosts(), 3);
  EXPECT_EQ(layout.host_of_rank, (std::vector<int>{0, 1, 0, 2, 1}));
  EXPECT_EQ(layout.slot_of_rank, (std::vector<int>{0, 0, 1, 0, 1}));
  EXPECT_EQ(layout.ranks_of(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(layout.ranks_of(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(layout.ranks_of(2), std::vector<int>{3});
}

TEST(Layout, DescribesAlsoARankThatDoesNotExist) {
  const Layout layout = layout_of_boots({"a", "a"});
  EXPECT_EQ(layout.describe(1), "rank 1 (host-a, pid 101)");
  for (const int rank : {-1, 2}) EXPECT_EQ(layout.describe(rank), format("rank {}", rank));
}

}  // namespace
}  // namespace cadre
