// Checks that the comparison of sharded_equality_test.cpp finds defects. The test leaves out a
// gather, a reduction, the division by the number of ranks or the initial broadcast, or puts values
// at a wrong place. Every wrapper must then exceed the bounds clearly, or itself throw because
// replicas differ.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
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
using testing::Strategy;
using testing::Training;

// A defect that is planted into the group of every rank.
enum class Plant {
  kNone,
  kNoReduction,
  kDroppedReduction,  // drops every third reduction
  kNoDivision,
  kNoGather,
  kMisplacedGather,
  kNoBroadcast
};

const char* name_of(Plant plant) {
  switch (plant) {
    case Plant::kNone:
      return "none";
    case Plant::kNoReduction:
      return "no_reduction";
    case Plant::kDroppedReduction:
      return "dropped_reduction";
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

// The number of gathers before the first update, which are left correct: they only gather the
// values of the initial broadcast.
constexpr int kNumRightGathers = 8;
// Gathers of fewer elements are left correct: ZeroRedundancyOptimizer also gathers single numbers,
// which are not parameters.
constexpr int64_t kMinGathered = 16;

void gather_wrongly(Plant plant, GroupCall& call, int rank, int world_size) {
  if (plant == Plant::kNoGather) {
    call.output.view({world_size, -1})[rank].copy_(call.input);
    return;
  }
  // Shifts the elements of the buffer by one.
  call.pass_on();
  call.output.copy_(call.output.clone().roll(1));
}

void inject(Plant plant, const FakeGroup& group) {
  const int rank = group.group().rank();
  const int world_size = group.group().world_size();
  group.on_call = [=, num_gathers = 0, num_reductions = 0](GroupCall& call) mutable {
    const torch::NoGradGuard no_grad;
    if (plant == Plant::kDroppedReduction && call.is_reduction_of_values() &&
        num_reductions++ % 3 == 1) {
      return;
    }
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
      // The output may be memory that still has the root's values by chance, so it is set to zero.
      if (call.root != rank) call.output.zero_();
      return;
    }
    call.pass_on();
  };
}

struct PlantCase {
  Strategy strategy;
  Plant plant;
  Case training;
};

std::ostream& operator<<(std::ostream& out, const PlantCase& given) {
  return out << given.strategy << "_" << name_of(given.plant) << "_" << given.training;
}

struct Outcome {
  Comparison worst;
  std::string failures;  // the errors that a wrapper itself has thrown
};

Outcome train_with(const PlantCase& given) {
  const ShardedCase test_case{given.training};
  const int world_size = 2 * given.strategy.num_replicas;
  const auto batches = testing::make_batches(test_case.training, 1);
  const Training alone = testing::train_alone(test_case.training, batches, 1);
  std::vector<std::shared_ptr<Model>> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.push_back(testing::make_unit_model(test_case.training, 1 + static_cast<uint64_t>(rank)));
  }
  std::vector<Comparison> comparisons(static_cast<size_t>(world_size));
  const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
    const Training trained =
        train_under(given.strategy, test_case, batches, group, models[group.rank()],
                    [&](const FakeGroup& replicas) { inject(given.plant, replicas); });
    comparisons[group.rank()] = compare_with_losses(test_case.training, trained, alone);
  });
  Outcome outcome{.worst = {}, .failures = result.failures()};
  for (const Comparison& comparison : comparisons) {
    outcome.worst = worse_of(outcome.worst, comparison);
  }
  return outcome;
}

class ShardedEqualityNotices : public ::testing::TestWithParam<PlantCase> {};

TEST_P(ShardedEqualityNotices, ThePlant) {
  const PlantCase& given = GetParam();
  const auto& [worst, failures] = train_with(given);
  if (given.plant == Plant::kNone) {
    EXPECT_EQ(failures, "");
    EXPECT_LE(std::max({worst.losses, worst.gradients, worst.parameters}), 1);
    return;
  }
  const bool is_replicated = given.strategy.sharding == DataStrategy::kDdp;
  const bool is_noticed =
      given.plant == Plant::kDroppedReduction || given.plant == Plant::kNoBroadcast;
  if (is_replicated && is_noticed) {
    // The ranks' parameters differ after this defect, which the wrapper notices by comparing
    // samples of them. It cannot notice that if there is no reduction at all, because the samples
    // are sent with the gradients.
    EXPECT_THAT(failures, ::testing::HasSubstr("has other values on rank 1 than on rank 0"));
  }
  if (!failures.empty()) return;
  const double far = given.training.dtype == torch::kDouble ? 1e3 : 100;
  if (is_replicated) EXPECT_GT(worst.first_gradients, far);
  if (given.training.optimizer == "adamw") {
    // A factor of all gradients does not change the steps of AdamW, so only the gradients exceed
    // their bound.
    EXPECT_LE(worst.parameters, 1);
  } else {
    EXPECT_GT(std::max(worst.gradients, worst.parameters), far);
    if (is_replicated) EXPECT_GT(worst.parameters, far);
  }
}

std::vector<PlantCase> plant_cases() {
  const Strategy ddp{"ddp", DataStrategy::kDdp};
  std::vector<PlantCase> cases;
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const Case mlp{"mlp", "sgd", 48, dtype};
    for (const Strategy& strategy :
         {Strategy{"zero1", DataStrategy::kZero1}, Strategy{"zero2", DataStrategy::kZero2},
          Strategy{"fsdp", DataStrategy::kFsdp}, Strategy{"hsdp", DataStrategy::kHsdp, {}, 2}}) {
      for (const Plant plant : {Plant::kNone, Plant::kNoReduction, Plant::kNoDivision,
                                Plant::kNoGather, Plant::kMisplacedGather, Plant::kNoBroadcast}) {
        cases.push_back({strategy, plant, mlp});
      }
    }
    cases.push_back({ddp, Plant::kNone, mlp});
    cases.push_back({ddp, Plant::kNoReduction, mlp});
  }
  for (const Case& training :
       {Case{"mlp", "sgd", 48}, Case{"mlp", "sgd", 48, torch::kFloat}, Case{"cnn", "sgd", 48},
        Case{"cnn", "sgd", 48, torch::kFloat}, Case{"gpt", "adamw", 48, torch::kFloat}}) {
    for (const Plant plant : {Plant::kDroppedReduction, Plant::kNoDivision, Plant::kNoBroadcast}) {
      cases.push_back({ddp, plant, training});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Plants, ShardedEqualityNotices, ::testing::ValuesIn(plant_cases()),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
