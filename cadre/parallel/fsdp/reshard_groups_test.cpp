// Tests Reshard::kOntoGroup, with which each unit is divided among a smaller group of ranks between
// forward and backward: that it computes the same bits as the other modes, how much memory it
// needs, and how much is gathered in the whole group and in the smaller one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

constexpr int kTowerUnits = 6;

FullyShardedDataParallelOptions onto_groups_of(int size) {
  FullyShardedDataParallelOptions options = every_unit();
  options.reshard = Reshard::kOntoGroup;
  options.reshard_group_size = size;
  return options;
}

struct ReshardCase {
  const char* name;
  const char* model;
  int world_size;
  int group_size;
  ShardPrecision precision = {};
  Reshard reshard_root = Reshard::kAfterBackward;
};

class FsdpReshardOntoGroup : public ::testing::TestWithParam<ReshardCase> {};

TEST_P(FsdpReshardOntoGroup, HasTheBitsOfTheOtherModes) {
  const ReshardCase& mode = GetParam();
  const Case test_case{mode.model, "adamw", 25, torch::kFloat};
  const auto batches = make_batches(test_case, 1);
  FullyShardedDataParallelOptions options = all_units(test_case, mode.world_size);
  options.precision = mode.precision;
  const auto expected = train_sharded(test_case, batches, 1, mode.world_size, options);
  options.reshard = Reshard::kOntoGroup;
  options.reshard_group_size = mode.group_size;
  options.reshard_root = mode.reshard_root;
  const auto trained = train_sharded(test_case, batches, 1, mode.world_size, options);
  for (int rank = 0; rank < mode.world_size; ++rank) {
    EXPECT_EQ(bits_of(trained[rank].parameters), bits_of(expected[rank].parameters)) << rank;
    EXPECT_EQ(bits_of(trained[rank].gradients.back()), bits_of(expected[rank].gradients.back()));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, FsdpReshardOntoGroup,
    ::testing::Values(
        ReshardCase{"mlp_4_onto_2", "mlp", 4, 2}, ReshardCase{"gpt_4_onto_2", "gpt", 4, 2},
        ReshardCase{"gpt_6_onto_3", "gpt", 6, 3, {}, Reshard::kOntoGroup},
        ReshardCase{
            "bfloat16", "gpt", 4, 2, {.parameters = torch::kBFloat16, .reduce = torch::kFloat}},
        ReshardCase{"onto_1", "mlp", 2, 1}, ReshardCase{"onto_all", "mlp", 2, 2}),
    [](const auto& mode) { return mode.param.name; });

// A training step that accumulates under no_sync(), and runs forwards without grad at several
// points.
struct ReshardSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    const auto pass = [&](const Tensor& part) { model.forward(part).pow(2).mean().backward(); };
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      model.forward(rows);
    };
    {
      const auto guard = model.no_sync();
      pass(rows.sin());
      evaluate();
      pass(rows.cos());
    }
    const Tensor loss = model.forward(rows).pow(2).mean();
    evaluate();  // must not use the parts of units that the previous forward has kept
    loss.backward();
    evaluate();
    // No backward follows, so the ranks keep parts with values from before the optimizer step. The
    // next step must not use them.
    model.forward(rows.sin());
  }
};

TEST(FsdpReshardMechanics, KeepsTheNumbersUnderAccumulationAndEvaluation) {
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const auto train = [&](const FullyShardedDataParallelOptions& options) {
      FullyShardedDataParallel model{std::make_shared<Tower>(), group, options};
      return bits_of(train_wrapped(model, group, ReshardSteps{}));
    };
    require(train(onto_groups_of(2)) == train(every_unit()), "other bits");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Units have different group sizes. On a mesh the groups consist of ranks along the shard axis.
TEST(FsdpReshardMechanics, ChoosesTheGroupForEachUnit) {
  const auto result = run_groups(8, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"replicate", 2}, {"shard", 4}});
    const auto train = [&](bool onto_groups) {
      const auto module = std::make_shared<Tower>();
      FullyShardedDataParallelOptions options = onto_groups ? onto_groups_of(2) : every_unit();
      if (onto_groups) {
        fully_shard(module->units[1], {.reshard = Reshard::kAfterForward});
        fully_shard(module->units[2], {.reshard_group_size = 4});
      }
      FullyShardedDataParallel model{module, mesh, options};
      train_wrapped(model, group, PlainSteps{});
      return bits_of(copies_of(model.parameters()));
    };
    require(train(true) == train(false), "other bits");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The expected memory: after the forward a rank has the root and half of each unit, because groups
// have 2 ranks. At the peak it has, in addition, the unit that computes and the prefetched one as a
// whole; the halves of these two may exist at the same time.
TEST(FsdpReshardMemory, IsThatOfThePartsAndTwoUnits) {
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const int64_t unit = bytes_of_linear(kWidth, 4);
    const int64_t root = bytes_of_linear(1, 4);
    FullyShardedDataParallelOptions options = onto_groups_of(2);
    FullyShardedDataParallel model{std::make_shared<Tower>(kTowerUnits), group, options};
    for (int step = 0; step < kTowerSteps; ++step) {
      const Tensor loss = model(testing::rows_of(group, step)).pow(2).mean();
      EXPECT_EQ(model.full_bytes(), root + kTowerUnits * unit / 2) << "after the forward";
      loss.backward();
      EXPECT_EQ(model.full_bytes(), 0) << "after the backward";
    }
    EXPECT_EQ(model.peak_full_bytes(), root + 2 * unit + kTowerUnits * unit / 2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Returns the number of elements that a rank receives from all_gathers in the whole group during
// the second step.
int64_t gathered_over_all(const ProcessGroup& group,
                          const FullyShardedDataParallelOptions& options) {
  const FakeGroup counting(group);
  int64_t num_gathered = 0;
  counting.on_call = [&](GroupCall& call) {
    if (call.kind == OpKind::kAllGather && call.is_of_values()) {
      num_gathered += call.output.numel() - call.input.numel();
    }
    call.pass_on();
  };
  parallel::ShardGroups groups = parallel::ShardGroups::of(group);
  groups.all = counting.group();
  FullyShardedDataParallel model{std::make_shared<Tower>(kTowerUnits), groups, options};
  for (int step = 0; step < 2; ++step) {
    num_gathered = 0;
    model(testing::rows_of(group, step)).pow(2).mean().backward();
  }
  return num_gathered;
}

TEST(FsdpReshardTraffic, BackwardGathersWithinTheSmallGroup) {
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const auto size = static_cast<int64_t>(sizeof(double));
    const int64_t unit = bytes_of_linear(kWidth, 4) / size * 3 / 4;
    const int64_t root = bytes_of_linear(1, 4) / size * 3 / 4;
    EXPECT_EQ(gathered_over_all(group, every_unit()), root + 2 * kTowerUnits * unit);
    EXPECT_EQ(gathered_over_all(group, onto_groups_of(2)), root + kTowerUnits * unit);
    EXPECT_EQ(gathered_over_all(group, onto_groups_of(1)), root + kTowerUnits * unit);
    EXPECT_EQ(gathered_over_all(group, onto_groups_of(4)), root + 2 * kTowerUnits * unit);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpReshardErrors, SayWhatMustDivideWhat) {
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const auto failure = [&](const FullyShardedDataParallelOptions& options) {
      return failure_of([&] {
        FullyShardedDataParallel{std::make_shared<Tower>(), group, options};
      });
    };
    FullyShardedDataParallelOptions options = onto_groups_of(3);
    EXPECT_THAT(failure(options),
                HasSubstr("the reshard of unit \"unit0\": Reshard::kOntoGroup onto groups of 3 "
                          "ranks, which does not divide 4: set reshard_group_size to a divisor of "
                          "4, the number of ranks that own shards"));
    options.reshard_group_size = 0;
    EXPECT_THAT(failure(options), HasSubstr("onto groups of 0 ranks"));
    options.reshard_group_size.reset();
    EXPECT_THAT(failure(options), HasSubstr("Reshard::kOntoGroup needs the size of the group"));
    options = every_unit();
    options.reshard_root = Reshard::kOntoGroup;
    EXPECT_THAT(failure(options), HasSubstr("options.reshard_root: Reshard::kOntoGroup needs"));
    options.reshard_root = Reshard::kAfterBackward;
    options.reshard = Reshard::kOntoGroup;
    options.reshard_group_size = group.rank() == 2 ? 2 : 4;
    EXPECT_THAT(failure(options),
                HasSubstr("reshard is after_forward on rank 0 and onto_group on rank 2"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
