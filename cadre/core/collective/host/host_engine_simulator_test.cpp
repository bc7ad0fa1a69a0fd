// Tests the host engine in virtual time: many interleavings, and the errors of the other ranks if
// one is killed.
#include <gtest/gtest.h>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/equal_bytes.h"
#include "cadre/testing/core/host_engine_ranks.h"
#include "cadre/testing/core/reference_reduction.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre {
namespace {

using sim::Fault;
using sim::SimOptions;
using sim::When;
using testing::equal_bytes;
using testing::Inputs;
using testing::random_inputs;
using testing::RankContext;
using testing::reference_reduction;
using testing::require;
using testing::run_ranks_in_simulator;

// These counts use each way to move data (inline, flat, large), and one needs several chunks.
constexpr size_t kCounts[] = {3, 500, 9000, 700000};

struct Case {
  Inputs inputs;
  std::vector<std::byte> expected;
};

std::vector<Case> make_cases(int num_ranks) {
  std::vector<Case> cases;
  for (size_t count : kCounts) {
    Inputs inputs = random_inputs(static_cast<size_t>(num_ranks), count, DType::kFloat32, count);
    std::vector<std::byte> expected = reference_reduction(inputs, kFloatSum);
    cases.push_back({std::move(inputs), std::move(expected)});
  }
  return cases;
}

void run_cases(TestRank& rank, RankContext& context, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    std::vector<std::byte> data = c.inputs[static_cast<size_t>(context.rank.value)];
    rank.all_reduce(data, data, kFloatSum).value_or_throw();
    require(equal_bytes(data, c.expected), format("all_reduce of {} bytes", data.size()));
    rank.broadcast(data, 0).value_or_throw();
    rank.barrier().value_or_throw();
  }
}

// Naps are longer than the deadline, so a lost wake-up causes a timeout.
TEST(HostEngineSimulatorTest, EveryOrderOfEventsEndsRightAndLosesNoWakeUp) {
  constexpr int kNumRanks = 3;
  const std::vector<Case> cases = make_cases(kNumRanks);
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    TestMemory memory(kNumRanks);
    const SimOptions options{.max_nap = std::chrono::hours(1)};
    const auto result = run_ranks_in_simulator(seed, options, kNumRanks, [&](RankContext& context) {
      TestRank rank(context, memory);
      run_cases(rank, context, cases);
    });
    ASSERT_TRUE(result.ok()) << "seed " << seed << "\n" << result.failures();
  }
}

// Rank 1 is killed at every point. The other ranks either name it in their error or have completed
// the operation.
TEST(HostEngineSimulatorTest, SurvivorsNameTheRankThatWasKilledAtAnyPoint) {
  constexpr int kNumRanks = 3;
  const std::vector<Case> cases = make_cases(kNumRanks);
  int num_named = 0;
  for (int64_t point = 1; point <= 60; ++point) {
    TestMemory memory(kNumRanks);
    const SimOptions options{.faults = {Fault::kill(1, When::at_point(1, point))}};
    const auto result = run_ranks_in_simulator(
        static_cast<uint64_t>(point), options, kNumRanks, [&](RankContext& context) {
          TestRank rank(context, memory);
          try {
            run_cases(rank, context, cases);
            context.output = "done";
          } catch (const Error& error) {
            require(error.code() == ErrorCode::kTimeout, error.message());
            context.output = format("{}", rank.progress().waiting_for());
          }
        });
    for (int survivor : {0, 2}) {
      const std::string& output = result.ranks[static_cast<size_t>(survivor)].output;
      EXPECT_TRUE(output == "1" || output == "done")
          << "killed at point " << point << ", rank " << survivor << " named " << output << "\n"
          << result.failures();
      if (output == "1") ++num_named;
    }
  }
  EXPECT_GT(num_named, 40);
}

}  // namespace
}  // namespace cadre
