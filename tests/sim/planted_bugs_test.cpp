// Tests that each planted bug makes at least one of the first 200 seeds of the simulated tests
// fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iostream>

#include "cadre/core/base/format.h"
#include "simulated_job.h"

namespace cadre::testing {
namespace {

using sim::Fault;
using sim::When;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kNumSeeds = 200;

struct Hunt {
  PlantedBug bug = PlantedBug::kNone;
  Shape shape = Shape::kSharedMemory;
  int world_size = 3;
  int num_groups = 1;
  std::vector<Fault> faults;
  Duration max_nap = sim::SimOptions().max_nap;
  Duration keeps_failed_group{};
  std::function<bool(const JobOutcome&)> is_wrong = [](const JobOutcome& outcome) {
    return !outcome.all_right();
  };
};

// Returns the first seed whose run fails; 0 if none fails.
uint64_t find_bug(const Hunt& hunt, uint64_t num_seeds = kNumSeeds) {
  const std::array shapes = {hunt.shape};
  for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
    JobPlan plan = plan_job(seed, shapes, hunt.world_size);
    plan.bug = hunt.bug;
    plan.num_groups = hunt.num_groups;
    plan.options.faults = hunt.faults;
    plan.options.max_nap = hunt.max_nap;
    plan.keeps_failed_group = hunt.keeps_failed_group;
    if (hunt.is_wrong(run_job(plan))) return seed;
  }
  return 0;
}

// At least one seed must fail if the bug is planted. No seed may fail without the bug, which
// communicator_seeds_test.cpp checks more thoroughly.
void expect_found(Hunt hunt) {
  const uint64_t seed = find_bug(hunt);
  EXPECT_GT(seed, 0u);
  std::cout << format("found by seed {}", seed) << std::endl;
  hunt.bug = PlantedBug::kNone;
  EXPECT_EQ(find_bug(hunt, 50), 0u);
}

TEST(PlantedBugs, ALostWakeUpIsFound) {
  expect_found({.bug = PlantedBug::kLostWakeUp, .max_nap = hours(1)});
}

TEST(PlantedBugs, AWrongTagIsFound) {
  expect_found({.bug = PlantedBug::kWrongTag, .shape = Shape::kHostEach});
}

// A rank with this bug does not notice the interrupt, so it learns of a death only when ranks that
// know of it close their connections.
TEST(PlantedBugs, AMissingAbortCheckIsFound) {
  constexpr int kVictim = 2;
  constexpr Duration kKillTime = milliseconds(200);  // the operations are running at this time
  const auto is_late = [&](const JobOutcome& outcome) {
    return std::ranges::any_of(outcome.ranks, [&](const RankReport& report) {
      // Ranks that are still connecting are not counted, because they notice a loss only at their
      // deadline.
      const bool is_survivor = &report != &outcome.ranks[kVictim];
      return is_survivor && report.failure && !report.was_connecting() &&
             report.failed_at > TimePoint{} + kKillTime + seconds(2);
    });
  };
  expect_found({.bug = PlantedBug::kMissingAbortCheck,
                .shape = Shape::kHostEach,
                // With 12 ranks, not every rank has a data connection to the victim.
                .world_size = 12,
                .faults = {Fault::kill(kVictim, When::at_time(kKillTime))},
                .keeps_failed_group = seconds(5),
                .is_wrong = is_late});
}

TEST(PlantedBugs, MemoryThatIsNotClearedIsFound) {
  expect_found({.bug = PlantedBug::kUsedPages});
}

TEST(PlantedBugs, AStaleRoundIsFound) {
  expect_found({.bug = PlantedBug::kStaleRound, .num_groups = 2});
}

}  // namespace
}  // namespace cadre::testing
