// Tests that training on ranks that are processes equals training in one process. Each rank first
// trains every case alone, then with the other ranks under each wrapper, and compares the two
// within the bounds of wrap_bounds.h.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/sharded_training.h"

namespace cadre {
namespace {

using testing::Case;
using testing::Comparison;
using testing::Division;
using testing::RankContext;
using testing::ShardedCase;
using testing::Strategy;
using testing::Training;

// Trains under one strategy. Returns a line with a digest of the result, which must be equal on all
// ranks.
std::string train_and_compare_under(const Strategy& strategy, const ShardedCase& test_case,
                                    const ProcessGroup& group) {
  const auto batches = testing::make_batches(test_case.training, 1);
  const Training alone = testing::train_alone(test_case.training, batches, 1);
  const Training trained = train_under(
      strategy, test_case, batches, group,
      testing::make_unit_model(test_case.training, 1 + static_cast<uint64_t>(group.rank())));
  const Comparison comparison = compare_with_losses(test_case.training, trained, alone);
  const std::string line =
      format("{} under {}: losses {}, first gradients {}, parameters {} of their bounds; bits {}\n",
             ::testing::PrintToString(test_case), strategy.name, comparison.losses,
             comparison.first_gradients, comparison.parameters,
             static_cast<uint64_t>(std::hash<std::string>()(testing::bits_of(trained.parameters))));
  testing::require(
      comparison.losses <= 1 && comparison.first_gradients <= 1 && comparison.parameters <= 1,
      line);
  return line;
}

std::vector<ShardedCase> process_cases() {
  return {{{"mixed", "adamw", 25, torch::kDouble}, Division::kEmpty},
          {{"gpt", "adamw", 48, torch::kFloat}, Division::kNoSync},
          {{"mixed", "sgd", 25, torch::kFloat}, Division::kWhole},
          {{"cnn", "sgd", 25, torch::kDouble}, Division::kSynced}};
}

struct ShardedJob {
  int world_size;
  TransportChoice transport = TransportChoice::kAuto;
  // The names of the strategies to test; if empty, all that are possible with this number of ranks.
  std::vector<std::string> names = {};

  std::vector<Strategy> strategies() const {
    std::vector<Strategy> chosen;
    for (Strategy strategy : testing::all_strategies(world_size)) {
      strategy.shares_memory = transport != TransportChoice::kTcp;
      const bool is_named = std::ranges::find(names, strategy.name) != names.end();
      if (names.empty() || is_named) chosen.push_back(strategy);
    }
    return chosen;
  }
};

class ShardedProcesses : public ::testing::TestWithParam<ShardedJob> {};

TEST_P(ShardedProcesses, TrainAsOneDoes) {
  const testing::Resources before = testing::count_resources();
  testing::JobOptions options{.world_size = GetParam().world_size};
  options.processes.time_limit = std::chrono::seconds(120);
  const auto result =
      testing::run_job(options, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        CommunicatorOptions communication;
        communication.transport = GetParam().transport;
        const ProcessGroup group(testing::connect(context, membership, communication));
        for (const ShardedCase& test_case : testing::share_of(process_cases())) {
          for (const Strategy& strategy : GetParam().strategies()) {
            context.output += train_and_compare_under(strategy, test_case, group);
          }
        }
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_EQ(rank.output, result.ranks[0].output);
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedProcesses,
                         ::testing::Values(ShardedJob{1, TransportChoice::kAuto, {"ddp"}},
                                           ShardedJob{2},
                                           ShardedJob{3, TransportChoice::kAuto, {"ddp"}},
                                           ShardedJob{4}, ShardedJob{3, TransportChoice::kTcp},
                                           ShardedJob{8, TransportChoice::kAuto, {"ddp"}}),
                         [](const auto& test) {
                           return format(
                               "{}_{}", test.param.world_size,
                               test.param.transport == TransportChoice::kTcp ? "tcp" : "host");
                         });

}  // namespace
}  // namespace cadre
