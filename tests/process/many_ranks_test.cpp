// Runs a job of 64 processes, which are far more than most machines have cores.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/process_job.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::RankContext;
using testing::require;

constexpr int kNumRanks = 64;
constexpr Duration kBudget = seconds(60);
constexpr size_t kNumValues = 1000;

class ManyRanks : public ::testing::TestWithParam<TransportChoice> {};

TEST_P(ManyRanks, MeetAndSum) {
  const auto result = testing::run_job(
      {.world_size = kNumRanks, .processes = {.time_limit = kBudget}},
      [](RankContext& context, const Membership& membership) {
        const auto world =
            testing::connect(context, membership, {.transport = GetParam()}, kBudget);
        for (const size_t num_values : {size_t{1}, kNumValues}) {
          std::vector<int64_t> values(num_values, world->rank() + 1);
          const Bytes data = std::as_writable_bytes(std::span(values));
          world->all_reduce(data, data, DType::kInt64, ReduceOp::kSum);
          const std::vector<int64_t> sums(num_values, kNumRanks * (kNumRanks + 1) / 2);
          require(values == sums, format("the sum of {} values is {}", num_values, values.front()));
        }
        world->close(context.system.deadline_in(kBudget));
      });
  EXPECT_EQ(result.ranks.size(), static_cast<size_t>(kNumRanks));
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(All, ManyRanks,
                         ::testing::Values(TransportChoice::kSharedMemory, TransportChoice::kTcp),
                         [](const auto& parameter) {
                           return parameter.param == TransportChoice::kTcp ? "tcp" : "host";
                         });

}  // namespace
}  // namespace cadre
