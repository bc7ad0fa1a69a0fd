// Tests exactly how many bytes of gathered parameters a rank has in memory, also if activations are
// recomputed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers

TEST(FsdpMemory, IsThatOfTheRootAndTwoUnits) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    const int64_t unit = bytes_of_linear(kWidth, 3);
    const int64_t root = bytes_of_linear(1, 3);
    const auto peak_of = [&](FullyShardedDataParallelOptions options) {
      options.wrap_policy = wrap_shard_units();
      FullyShardedDataParallel model{std::make_shared<Tower>(6), group, options};
      EXPECT_EQ(model.full_bytes(), 0) << "after construction";
      train_wrapped(model, group, PlainSteps{});
      EXPECT_EQ(model.full_bytes(), 0) << "after the step";
      return model.peak_full_bytes();
    };
    EXPECT_EQ(peak_of({}), root + 2 * unit);
    EXPECT_EQ(peak_of({.num_prefetched = 0}), root + unit);
    EXPECT_EQ(peak_of({.reshard_root = Reshard::kAfterForward}), root + 2 * unit);
    EXPECT_EQ(peak_of({.reshard = Reshard::kAfterBackward}), root + 6 * unit);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMemory, OfAForwardWithoutGradIsThatOfTheRootAndTwoUnits) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{std::make_shared<Tower>(6), group, every_unit()};
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) model(rows_of(group, i));
    EXPECT_EQ(model.peak_full_bytes(), bytes_of_linear(1, 2) + 2 * bytes_of_linear(kWidth, 2));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The whole gradients of at most one unit and of the root may exist at the same time, also in the
// first backward, in which the order of the units is not known yet.
TEST(FsdpMemory, FewFullGradientsExistAtATime) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<Tower>(6);
    FullyShardedDataParallel model{net, group, every_unit()};
    int64_t most = 0;
    for (Tensor& parameter : net->parameters()) {
      parameter.register_hook([&](const Tensor&) {
        const auto is_there = [](const Tensor& each) { return each.grad().defined(); };
        most = std::max<int64_t>(most, std::ranges::count_if(net->parameters(), is_there));
      });
    }
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      model(rows_of(group, step)).sum().backward();
    }
    EXPECT_LE(most, 4) << "a weight and a bias of a unit, and of the root";
    EXPECT_GE(most, 1);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpRecomputation, TrainsAsThePlainModelInTheMemoryOfTwoUnits) {
  const Snapshot expected = train_plain(std::make_shared<Tower>(4), PlainSteps{});
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{std::make_shared<Recomputed>(), group, every_unit()};
    expect_equal(train_wrapped(model, group, PlainSteps{}), expected);
    EXPECT_EQ(model.peak_full_bytes(), bytes_of_linear(1, 2) + 2 * bytes_of_linear(kWidth, 2));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
