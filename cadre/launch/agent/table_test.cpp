#include "cadre/launch/agent/table.h"

#include <gtest/gtest.h>

#include "cadre/core/base/random.h"

namespace cadre::launch {
namespace {

Table table_of(std::vector<uint32_t> slots) {
  Table table{.job = "job",
              .epoch = 3,
              .version = 12,
              .round = 7,
              .phase = Phase::kRunning,
              .coordinator = 1,
              .restarts_used = 2,
              .first_coordinator = 5,
              .reason = "why"};
  for (size_t i = 0; i < slots.size(); ++i) {
    table.hosts.push_back({.id = i + 1,
                           .name = "host",
                           .address = "10.0.0.1:29400",
                           .role = i % 2 == 0 ? "even" : "odd",
                           .num_slots = slots[i],
                           .state = HostState::kIn,
                           .node_rank = static_cast<uint32_t>(i)});
  }
  return table;
}

TEST(HostTable, SurvivesEncoding) {
  Table table = table_of({2, 3, 1});
  table.hosts.push_back({.id = 9, .name = "spare", .wanted_rank = 4});
  table.quorums = {{1, 2, 3}, {2, 9}};
  const auto decoded = decode_table(encode(table));
  ASSERT_TRUE(decoded.ok()) << decoded.error().message();
  EXPECT_EQ(*decoded, table);
}

TEST(HostTable, RefusesEveryTruncationAndOneByteMore) {
  std::vector<std::byte> bytes = encode(table_of({2, 3}));
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_table(ConstBytes(bytes).first(size)).ok()) << size;
  }
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_table(bytes).ok());
}

TEST(HostTable, RefusesTwoHostsWithOneIdOrOneRank) {
  Table table = table_of({1, 1});
  table.hosts[1].id = table.hosts[0].id;
  EXPECT_FALSE(decode_table(encode(table)).ok());
  table = table_of({1, 1});
  table.hosts[1].node_rank = 0;
  EXPECT_FALSE(decode_table(encode(table)).ok());
  table.hosts[1].state = HostState::kLost;
  EXPECT_TRUE(decode_table(encode(table)).ok());
}

TEST(HostTable, RanksAreSumsOfTheSlotsBefore) {
  const Table table = table_of({2, 3, 1, 4});
  EXPECT_EQ(ranks_of(table, 3), (HostRanks{.group_rank = 2,
                                           .num_hosts = 4,
                                           .local_world_size = 1,
                                           .first_rank = 5,
                                           .world_size = 10,
                                           .first_role_rank = 2,
                                           .role_world_size = 3}));
  EXPECT_EQ(ranks_of(table, 4)->first_rank, 6U);
  EXPECT_EQ(ranks_of(table, 4)->first_role_rank, 3U);
  EXPECT_EQ(ranks_of(table, 5), std::nullopt);
}

TEST(HostTable, HostsKeepTheirRankAndTheHighestFillsAGap) {
  Table table = table_of({1, 1, 1, 1});
  table.hosts[1].state = HostState::kLost;
  assign_places(table, 4);
  ASSERT_EQ(table.hosts.size(), 3U);
  EXPECT_EQ(table.find(1)->node_rank, 0U);
  EXPECT_EQ(table.find(3)->node_rank, 2U);
  EXPECT_EQ(table.find(4)->node_rank, 1U);
}

TEST(HostTable, AWantedRankIsGivenAndNoOtherHostGetsIt) {
  Table table = table_of({1, 1, 1});
  table.hosts[1].wanted_rank = 0;
  table.hosts[2].wanted_rank = 1;
  assign_places(table, 3);
  EXPECT_EQ(table.find(1)->node_rank, 2U);
  EXPECT_EQ(table.find(2)->node_rank, 0U);
  EXPECT_EQ(table.find(3)->node_rank, 1U);
}

TEST(HostTable, AWantedRankThatCannotBeGivenIsNamed) {
  Table table = table_of({1, 1, 1});
  table.hosts[1].wanted_rank = 2;
  EXPECT_EQ(wrong_wanted_rank(table, 3), std::nullopt);
  EXPECT_EQ(wrong_wanted_rank(table, 2),
            "host host has --node-rank 2, and the job has 2 hosts, 0 to 1");
  table.hosts[2].wanted_rank = 2;
  EXPECT_EQ(wrong_wanted_rank(table, 3),
            "hosts host (10.0.0.1:29400) and host (10.0.0.1:29400) both have --node-rank 2; give "
            "each host a rank of its own");
  table.hosts[2].state = HostState::kLost;
  EXPECT_EQ(wrong_wanted_rank(table, 3), std::nullopt);
}

TEST(HostTable, SparesTakeTheFreePlacesOnly) {
  Table table = table_of({1, 1, 1});
  table.hosts[0].state = HostState::kLost;
  table.hosts.push_back({.id = 10});
  table.hosts.push_back({.id = 11});
  assign_places(table, 3);
  EXPECT_EQ(table.find(10)->node_rank, 0U);
  EXPECT_EQ(table.find(10)->state, HostState::kIn);
  EXPECT_EQ(table.find(11)->state, HostState::kSpare);
  EXPECT_EQ(table.find(11)->node_rank, std::nullopt);
  EXPECT_EQ(table.find(2)->node_rank, 1U);
}

}  // namespace
}  // namespace cadre::launch
