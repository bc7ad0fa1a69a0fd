// Tests main_rank_first() and related functions: which rank runs before which, which error the
// ranks throw, and which ranks write to the log.
#include "cadre/tensor/group/main_rank.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;

TEST(MainRank, RunsTheWorkOnceAndBeforeAnyRankReturns) {
  std::atomic<int> num_runs = 0;
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    on_main_rank(group, [&] { num_runs += group.rank() == 0 ? 1 : 100; });
    require(num_runs == 1, "the work of rank 0 is done");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MainRank, RunsFirstAndTheOthersFindWhatItHasLeft) {
  std::atomic<int> num_done = 0;
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    const int found = main_rank_first(group, [&] { return num_done++; });
    require((found == 0) == (group.rank() == 0), "rank 0 was first");
    require(num_done == 3, "all have ended");
    main_rank_first(group, [&] { num_done += 0; });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MainRank, OfEachNodeIsTheLowestRankOfTheGroupOnTheHost) {
  std::atomic<int> num_runs = 0;
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    const ProcessGroup odd = *world.split({.color = world.rank() % 2});
    on_main_rank(odd, [&] { ++num_runs; }, {.of_each_node = true});
    require(is_main_rank(odd, {.of_each_node = true}) == (world.rank() < 2), "the main rank");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(num_runs, 2);
}

// `work` throws on rank 0, the main rank, in the first round, and on rank 2 in the second one.
TEST(MainRank, ThrowsAnErrorOnAllRanksAndTheGroupStaysUsable) {
  const auto result = run_groups(3, [&](const ProcessGroup& group, std::string& output) {
    for (const int failing : {0, 2}) {
      std::atomic<int> num_runs = 0;
      output += failure_of([&] {
        main_rank_first(group, [&] {
          ++num_runs;
          if (group.rank() == failing) throw std::runtime_error("no space");
        });
      });
      require(num_runs == (failing == 0 && group.rank() != 0 ? 0 : 1), "who has run");
      output += "|";
    }
    output += failure_of([&] {
      on_main_rank(group, [] { throw Error(ErrorCode::kCorruption, "a damaged file"); });
    });
    const at::Tensor sum = torch::ones({1});
    group.all_reduce(sum);
    require(sum.item<int>() == 3, "the group is usable");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("no space (on rank 0 of 3"));
    EXPECT_THAT(rank.output, HasSubstr("no space (on rank 2 of 3"));
    EXPECT_THAT(rank.output, HasSubstr("kCorruption: a damaged file (on rank 0 of 3"));
  }
}

TEST(MainRank, TheRanksThatWaitGiveUpAtTheTimeout) {
  std::atomic<bool> has_given_up = false;
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    output = failure_of([&] {
      on_main_rank(group, [&] { has_given_up.wait(false); },
                   {.timeout = std::chrono::milliseconds(30)});
    });
    has_given_up = true;
    has_given_up.notify_all();
  });
  EXPECT_THAT(result.ranks[1].output, HasSubstr("kTimeout"));
  EXPECT_THAT(result.ranks[1].output, HasSubstr("rank 0"));
}

}  // namespace
}  // namespace cadre
