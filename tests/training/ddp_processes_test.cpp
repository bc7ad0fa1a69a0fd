// Equality with one process when the ranks are processes: each trains every case alone first, then
// with the others, and compares within the bounds of wrap_bounds.h.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/ddp_training.h"
#include "cadre/testing/torch/wrap_bounds.h"

namespace cadre {
namespace {

using testing::Case;
using testing::Comparison;
using testing::RankContext;
using testing::require;
using testing::Training;

constexpr uint64_t kSeed = 1;

// A line that is the same on all ranks when they hold the same bits.
std::string train_and_compare(const ProcessGroup& group, const Case& test_case) {
  const std::string name = ::testing::PrintToString(test_case);
  const auto batches = testing::make_batches(test_case, kSeed);
  const Training alone = testing::train_alone(test_case, batches, kSeed);
  const auto own_seed = kSeed + static_cast<uint64_t>(group.rank());
  const Training trained =
      testing::train_on_rank(test_case, batches, group, testing::make_model(test_case, own_seed));
  require(trained.gradients.size() == alone.gradients.size(), name + ": all steps");
  const Comparison comparison = testing::compare(test_case, trained, alone);
  const std::string line =
      format("{}: first gradients {}, of any step {}, parameters {} of their bounds; bits {}\n",
             name, comparison.first_gradients, comparison.gradients, comparison.parameters,
             static_cast<uint64_t>(std::hash<std::string>()(testing::bits_of(trained.parameters))));
  require(comparison.first_gradients <= 1 && comparison.parameters <= 1 &&
              (comparison.gradients <= 1 || !testing::uses_adamw_bound(test_case)),
          line);
  return line;
}

struct Job {
  int world_size;
  TransportChoice transport;
};

class DdpProcesses : public ::testing::TestWithParam<Job> {};

TEST_P(DdpProcesses, TrainAsOneDoes) {
  const testing::Resources before = testing::count_resources();
  testing::JobOptions options{.world_size = GetParam().world_size};
  options.processes.time_limit = std::chrono::seconds(120);
  const auto result =
      testing::run_job(options, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        CommunicatorOptions communication;
        communication.transport = GetParam().transport;
        const ProcessGroup group(testing::connect(context, membership, communication));
        for (const Case& test_case : testing::share_of(testing::all_cases())) {
          context.output += train_and_compare(group, test_case);
        }
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_EQ(rank.output, result.ranks[0].output);
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

INSTANTIATE_TEST_SUITE_P(
    Ranks, DdpProcesses,
    ::testing::Values(Job{1, TransportChoice::kAuto}, Job{2, TransportChoice::kAuto},
                      Job{3, TransportChoice::kAuto}, Job{4, TransportChoice::kAuto},
                      Job{8, TransportChoice::kAuto}, Job{3, TransportChoice::kTcp}),
    [](const auto& test) {
      return format("{}_{}", test.param.world_size,
                    test.param.transport == TransportChoice::kTcp ? "tcp" : "host");
    });

}  // namespace
}  // namespace cadre
