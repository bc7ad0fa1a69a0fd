#include "cadre/launch/cli/tune/measurement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/on_host.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using testing::RankContext;
using testing::require;

struct Choices {
  OpKind kind;
  Algorithm first;
  Algorithm second;
};
constexpr std::array kChoices{
    Choices{OpKind::kAllReduce, Algorithm::kRecursiveDoubling, Algorithm::kRing},
    Choices{OpKind::kBroadcast, Algorithm::kBinomialTree, Algorithm::kChain},
    Choices{OpKind::kAllGather, Algorithm::kBruck, Algorithm::kRing},
    Choices{OpKind::kGather, Algorithm::kBinomialTree, Algorithm::kLinear}};

Algorithm chosen(OpKind kind, uint64_t num_bytes, int world_size, const CrossoverTable& table) {
  return choose(
      {.kind = kind, .dtype = DType::kFloat32, .num_bytes = num_bytes, .world_size = world_size},
      table);
}

TEST(TuneMeasurement, ItsGroupsUseOneAlgorithmEach) {
  const CrossoverTable first = parse_tuning_file(tuning_of_first()).value_or_throw().table;
  const CrossoverTable second = parse_tuning_file(tuning_of_second()).value_or_throw().table;
  for (const Choices& choices : kChoices) {
    for (const int world_size : {3, 8, 100, 8192}) {
      for (const uint64_t num_bytes : {uint64_t{1} << 10, uint64_t{1} << 30}) {
        EXPECT_EQ(chosen(choices.kind, num_bytes, world_size, first), choices.first);
        EXPECT_EQ(chosen(choices.kind, num_bytes, world_size, second), choices.second);
      }
    }
  }
}

TEST(TuneMeasurement, AGroupOfTheMeasuredShapeCrossesWhereTheTimesDo) {
  std::vector<MeasuredOperation> results;
  uint64_t crossing = 1 << 20;
  for (const Choices& choices : kChoices) {
    results.push_back({.kind = choices.kind, .times = {{crossing, 1, 1}}, .crossing = crossing});
    crossing *= 2;
  }
  for (const int num_nodes : {3, 8, 16, 1024}) {
    const CrossoverTable table = table_of(results, num_nodes);
    EXPECT_EQ(table.chain_segment_bytes, CrossoverTable{}.chain_segment_bytes);
    for (size_t i = 0; i < results.size(); ++i) {
      const uint64_t size = results[i].crossing;
      EXPECT_EQ(chosen(results[i].kind, size, num_nodes, table), kChoices[i].second);
      EXPECT_EQ(chosen(results[i].kind, size - 1, num_nodes, table), kChoices[i].first);
    }
  }
  for (MeasuredOperation& result : results) result.is_default = true;
  EXPECT_EQ(table_of(results, 1024), CrossoverTable{});
}

// Ranks 0 and 1 are on one host, ranks 2 and 3 on another one.
TEST(TuneMeasurement, IsEqualOnAllRanksOfTwoHosts) {
  const auto run = testing::run_ranks_as_threads(4, [](RankContext& on_machine) {
    testing::run_on_host(on_machine, on_machine.rank.value / 2, [](RankContext& context) {
      const auto connect = [&](const std::string& name, const std::string& tuning) {
        return testing::connect_ranks(
            context, {.name = name, .timeout = testing::kRankTimeout, .tuning = tuning});
      };
      const auto world = connect("tune", "");
      const auto first = connect("tune/first", tuning_of_first());
      const auto second = connect("tune/second", tuning_of_second());
      const TunedGroups groups{*world, *first, *second};
      require(num_nodes_of(groups) == 2, "two hosts");
      std::vector<OpKind> announced;
      const auto results =
          measure(groups, {.sizes = {4096, 10'001}, .repetitions = 2},
                  [&](const MeasuredOperation& next) { announced.push_back(next.kind); });
      require(results.size() == kChoices.size(), "one result for each operation");
      for (size_t i = 0; i < results.size(); ++i) {
        const MeasuredOperation& result = results[i];
        require(result.kind == kChoices[i].kind && announced[i] == result.kind, "the order");
        const bool has_choice = result.kind == OpKind::kAllReduce || result.kind == OpKind::kGather;
        require(result.obstacle.empty() == has_choice, result.obstacle);
        require(result.times.size() == (has_choice ? 2U : 0U), "the number of sizes");
        context.output +=
            cadre::format("{} {} {}\n", result.kind, result.obstacle, result.crossing);
        for (const TimedSize& time : result.times) {
          require(time.first_us > 0 && time.second_us > 0, "positive times");
          context.output +=
              cadre::format("{} {} {}\n", time.num_bytes, time.first_us, time.second_us);
        }
      }
      require(results[0].times[1].num_bytes == 10'004, "a size of whole floats");
      for (const auto* group : {&second, &first, &world}) {
        (*group)->close(context.system.deadline_in(testing::kRankTimeout));
      }
    });
  });
  ASSERT_TRUE(run.ok()) << run.failures();
  for (const testing::RankOutcome& rank : run.ranks) {
    EXPECT_EQ(rank.output, run.ranks.front().output);
    EXPECT_THAT(rank.output, HasSubstr("broadcast between two hosts both algorithms send one"));
    EXPECT_THAT(rank.output, HasSubstr("all_gather between hosts it has one algorithm"));
  }
}

TEST(TuneMeasurement, TheTextShowsTimesAndChoices) {
  const std::vector<MeasuredOperation> results = {{.kind = OpKind::kAllReduce,
                                                   .first = "doubling",
                                                   .second = "ring",
                                                   .times = {{1024, 10, 20}, {2048, 30.25, 20}},
                                                   .crossing = 2048},
                                                  {.kind = OpKind::kGather,
                                                   .first = "tree",
                                                   .second = "linear",
                                                   .obstacle = "there is a reason"}};
  EXPECT_EQ(text_of(results),
            "all_reduce    doubling us      ring us  choice\n"
            "     1.0 KiB         10.0         20.0  doubling\n"
            "     2.0 KiB         30.2         20.0  ring\n"
            "ring from 2048 bytes\n\n"
            "gather: not measured, because there is a reason; the default stays\n\n");
}

}  // namespace
}  // namespace cadre::cli
