// The check of sharded_equality_test.cpp is itself checked: without a gather, a reduction, the
// division or the initial broadcast, and with values that arrive in another place, every wrapper
// fails it by far.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/testing/torch/sharded_training.h"

namespace cadre {
namespace {

using testing::Case;
using testing::Comparison;
using testing::FakeGroup;
using testing::GroupCall;
using testing::Model;
using testing::ShardedCase;
using testing::Sharding;
using testing::Strategy;
using testing::Training;

// The same on all ranks.
enum class Plant { kNone, kNoReduction, kNoDivision, kNoGather, kMisplacedGather, kNoBroadcast };

const char* name_of(Plant plant) {
  switch (plant) {
    case Plant::kNone:
      return "none";
    case Plant::kNoReduction:
      return "no_reduction";
    case Plant::kNoDivision:
      return "no_division";
    case Plant::kNoGather:
      return "no_gather";
    case Plant::kMisplacedGather:
      return "misplaced_gather";
    case Plant::kNoBroadcast:
      break;
  }
  return "no_broadcast";
}

std::ostream& operator<<(std::ostream& out, Plant plant) {
  return out << name_of(plant);
}

// What is gathered before are the values of the initial broadcast.
constexpr int kNumRightGathers = 8;
// Least size of parameter gathers; ZeroRedundancyOptimizer also gathers single elements.
constexpr int64_t kMinGathered = 16;

void gather_wrongly(Plant plant, GroupCall& call, int rank, int world_size) {
  if (plant == Plant::kNoGather) {
    call.output.view({world_size, -1})[rank].copy_(call.input);
    return;
  }
  // Its neighbours in the buffer change places.
  call.pass_on();
  call.output.copy_(call.output.clone().roll(1));
}

void inject(Plant plant, const FakeGroup& group) {
  const int rank = group.group().rank();
  const int world_size = group.group().world_size();
  group.on_call = [=, num_gathers = 0](GroupCall& call) mutable {
    const torch::NoGradGuard no_grad;
    if (plant == Plant::kNoReduction && call.is_reduction_of_values()) {
      if (call.kind == OpKind::kReduceScatter) {
        call.output.copy_(call.input.view({world_size, -1})[rank]);
      }
      return;
    }
    if (plant == Plant::kNoDivision && call.op() == ReduceOp::kAvg) {
      call.reduce_with(ReduceOp::kSum);
    }
    const bool is_gather = call.kind == OpKind::kAllGather && call.is_of_values() &&
                           call.input.numel() >= kMinGathered;
    if (is_gather && ++num_gathers > kNumRightGathers &&
        (plant == Plant::kNoGather || plant == Plant::kMisplacedGather)) {
      return gather_wrongly(plant, call, rank, world_size);
    }
    if (plant == Plant::kNoBroadcast && call.kind == OpKind::kBroadcast &&
        call.output.scalar_type() == at::kByte) {
      if (call.root != rank) call.output.zero_();
      return;
    }
    call.pass_on();
  };
}

// Infinite where the wrapper itself reports an error.
Comparison worst_with(const Strategy& strategy, Plant plant) {
  const ShardedCase test_case{Case{"mlp", "sgd", 48, torch::kDouble}};
  const int world_size = 2 * strategy.num_replicas;
  const auto batches = testing::make_batches(test_case.training, 1);
  const Training alone = testing::train_alone(test_case.training, batches, 1);
  std::vector<std::shared_ptr<Model>> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.push_back(testing::make_unit_model(test_case.training, 1 + static_cast<uint64_t>(rank)));
  }
  std::vector<Comparison> comparisons(static_cast<size_t>(world_size));
  const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
    const Training trained =
        train_under(strategy, test_case, batches, group, models[group.rank()],
                    [plant](const FakeGroup& replicas) { inject(plant, replicas); });
    comparisons[group.rank()] = compare_with_losses(test_case.training, trained, alone);
  });
  if (!result.ok()) return {.gradients = std::numeric_limits<double>::infinity()};
  Comparison worst;
  for (const Comparison& comparison : comparisons) worst = worse_of(worst, comparison);
  return worst;
}

class ShardedEqualityNotices : public ::testing::TestWithParam<std::tuple<Strategy, Plant>> {};

TEST_P(ShardedEqualityNotices, ThePlant) {
  const auto& [strategy, plant] = GetParam();
  const Comparison worst = worst_with(strategy, plant);
  if (plant == Plant::kNone) {
    EXPECT_LE(std::max({worst.losses, worst.gradients, worst.parameters}), 1);
  } else {
    EXPECT_GT(std::max(worst.gradients, worst.parameters), 1e3);
  }
}

const std::vector<Strategy>& strategies_with_plants() {
  static const std::vector<Strategy> strategies = {
      {"zero1", Sharding::kZero1},
      {"zero2", Sharding::kZero2},
      {"fsdp", Sharding::kFsdp},
      {"hsdp", Sharding::kFsdp, {}, 2},
  };
  return strategies;
}

INSTANTIATE_TEST_SUITE_P(Plants, ShardedEqualityNotices,
                         ::testing::Combine(::testing::ValuesIn(strategies_with_plants()),
                                            ::testing::Values(Plant::kNone, Plant::kNoReduction,
                                                              Plant::kNoDivision, Plant::kNoGather,
                                                              Plant::kMisplacedGather,
                                                              Plant::kNoBroadcast)),
                         [](const auto& parameter) {
                           return std::get<0>(parameter.param).name + "_" +
                                  name_of(std::get<1>(parameter.param));
                         });

}  // namespace
}  // namespace cadre
