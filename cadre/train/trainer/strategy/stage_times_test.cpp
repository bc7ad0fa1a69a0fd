#include "cadre/train/trainer/strategy/stage_times.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::train {
namespace {

TEST(StageTimesTest, ASlowStageIsNamed) {
  EXPECT_EQ(describe(std::vector<StageTime>{{10, 0}, {30.06, 5}, {9.5, 2}, {11, 3}}),
            "stages compute for 10.0 ms, 30.1 ms, 9.50 ms, 11.0 ms a microbatch; stage 1 on rank 5 "
            "takes 3.0 times as long as the others, which wait for it: look for other work on its "
            "cores");
}

TEST(StageTimesTest, StagesOfSimilarTimesAreNot) {
  EXPECT_EQ(describe(std::vector<StageTime>{{10, 0}, {14.9, 1}}),
            "stages compute for 10.0 ms, 14.9 ms a microbatch");
  EXPECT_EQ(describe(std::vector<StageTime>{{7, 0}}), "stages compute for 7.00 ms a microbatch");
}

// Ranks 0 and 2 have stage 0, and ranks 1 and 3 have stage 1. Two steps of four microbatches are
// measured.
TEST(StageTimesTest, TheSlowestProcessOfAStageCounts) {
  const auto result = testing::run_groups(4, [](const ProcessGroup& group) {
    const int stage = group.rank() % 2;
    StageTimes times(2);
    testing::require(times.of_all_processes(group).empty(),
                     "times were returned before the first step");
    for (int step = 0; step < 2; ++step) {
      std::array<Duration, 2> of_step = {};
      of_step[static_cast<size_t>(stage)] = std::chrono::milliseconds(8 * (group.rank() + 1));
      times.add(of_step, 4);
    }
    const std::vector<StageTime> stages = times.of_all_processes(group);
    testing::require(stages.size() == 2, "expected one time for each stage");
    testing::require(stages[0].milliseconds == 6 && stages[0].rank == 2, "rank 2 is slower than 0");
    testing::require(stages[1].milliseconds == 8 && stages[1].rank == 3, "rank 3 is slower than 1");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::train
