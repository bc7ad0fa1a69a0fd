// Tests the scaling of losses for float16 gradients.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/shards_of_ones.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();
constexpr double kPositiveInfinity = std::numeric_limits<double>::infinity();

// The gradients are set to the scale, so after unscale_() all must be 1. After 2 good steps
// (growth_interval) the scale must double.
TEST_P(GradientToolsOnRanks, ScalerUnscalesGradientsAndAllRanksStep) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {5, 3});
    GradScaler scaler({.initial_scale = 1024, .growth_interval = 2});
    for (int step = 0; step < 2; ++step) {
      for (const ParameterShard& shard : shards) {
        shard.values.mutable_grad().fill_(scaler.scale(torch::ones({})).item<double>());
      }
      EXPECT_TRUE(scaler.unscale_(std::span(shards)));
      for (const ParameterShard& shard : shards) {
        EXPECT_TRUE(torch::equal(shard.values.grad(), torch::ones_like(shard.values)));
      }
      scaler.update();
    }
    EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 2048, .num_good_steps = 0}));
  });
}

struct CountingOptimizer {
  int num_steps = 0;
  void step() { ++num_steps; }
};

TEST_P(GradientToolsOnRanks, ScalerLeavesAStepOutOnAllRanksAndLowersTheScale) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {8});
    GradScaler scaler({.initial_scale = 8, .growth_interval = 2});
    CountingOptimizer optimizer;
    EXPECT_TRUE(scaler.unscale_(std::span(shards)));
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    set_gradient(shards[0], 7, kPositiveInfinity);  // an element that the last rank owns
    EXPECT_FALSE(scaler.unscale_(std::span(shards)));
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(optimizer.num_steps, 1);
    // The bad step has halved the scale and reset the count of good steps to 0.
    EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 4, .num_good_steps = 0}));
  });
}

// The gradient is 2^-20 * 2^-6 = 2^-26. Without a scale float16 rounds it to 0, because its
// smallest number is 2^-24. With a scale of 2^10 it is 2^-16.
TEST(GradScaler, KeepsGradientsThatFloat16WouldLose) {
  const auto gradient_of = [](const std::function<Tensor(const Tensor&)>& scale) {
    const Tensor x = torch::full({1}, std::ldexp(1.0, -20), torch::kHalf);
    Tensor weight = torch::ones({1}, torch::kHalf).requires_grad_();
    const Tensor loss = (x * weight * std::ldexp(1.0, -6)).to(torch::kFloat).sum();
    scale(loss).backward();
    return weight;
  };
  EXPECT_EQ(gradient_of([](const Tensor& loss) { return loss; }).grad().item<double>(), 0);
  GradScaler scaler({.initial_scale = 1024});
  const Tensor weight = gradient_of([&](const Tensor& loss) { return scaler.scale(loss); });
  weight.mutable_grad() = weight.grad().to(torch::kHalf);
  const double scaled = weight.grad().item<double>();
  EXPECT_EQ(scaled, std::ldexp(1.0, -16));
}

// The scale is 2^16. A float16 gradient that is below 2^-14 after the division loses digits,
// because 2^-14 is the smallest normal number of float16; below 2^-25 it is rounded to 0.
TEST(GradScaler, RefusesToUnscaleWhatFloat16CannotHold) {
  const auto unscale = [](GradScaler& scaler, double value) {
    const Tensor fine = torch::zeros({3}).requires_grad_();
    const Tensor weight = torch::zeros({4}, torch::kHalf).requires_grad_();
    fine.mutable_grad() = torch::full({3}, 8.0F);
    weight.mutable_grad() = torch::full({4}, value, torch::kHalf);
    weight.mutable_grad()[0] = 0;
    const std::vector<Tensor> weights = {fine, weight};
    const std::string text = failure_of([&] { (void)scaler.unscale_(std::span(weights)); });
    EXPECT_EQ(fine.grad()[0].item<float>(), text.empty() ? 8.0F / 65536 : 8.0F) << text;
    EXPECT_EQ(weight.grad()[1].item<float>(), text.empty() ? value / 65536 : value) << text;
    return text;
  };
  GradScaler scaler({.initial_scale = 65536});
  EXPECT_THAT(unscale(scaler, std::ldexp(1.0, -10)),
              AllOf(HasSubstr("kInvalidArgument: GradScaler: the gradient of parameter 1 of 2 is "
                              "Half"),
                    HasSubstr("3 of its 4 elements")));
  EXPECT_NE(unscale(scaler, std::ldexp(1.0 + 0x1p-10, -1)), "")
      << "(1 + 2^-10) * 2^-17 loses digits in float16";
  EXPECT_EQ(unscale(scaler, 8.0), "");
  scaler.update();
  EXPECT_EQ(unscale(scaler, std::ldexp(1.0, -1)), "") << "float16 represents 2^-17 exactly";
}

// Only the last rank owns a gradient that float16 cannot represent without the scale. All ranks
// must throw, and no gradient may have changed.
TEST_P(GradientToolsOnRanks, ScalerRefusesWhatFloat16CannotHoldOnAllRanks) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {8, 8}, torch::kHalf);
    set_gradient(shards[1], 7, std::ldexp(1.0, -16));  // an element that the last rank owns
    GradScaler scaler({.initial_scale = 1024});
    const std::string text = failure_of([&] { (void)scaler.unscale_(std::span(shards)); });
    EXPECT_THAT(text, HasSubstr("the gradient of \"p1\" is Half"));
    const Tensor first = shards[0].values.grad();
    EXPECT_TRUE(first.eq(1).all().item<bool>()) << first;
    set_gradient(shards[1], 7, 2);
    EXPECT_TRUE(scaler.unscale_(std::span(shards)))
        << "the failed call does not count as a call of unscale_()";
    EXPECT_TRUE(first.eq(1.0 / 1024).all().item<bool>()) << first;
  });
}

TEST_P(GradientToolsOnRanks, ScalesThatDifferBetweenRanksAreRefused) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {8});
    GradScaler scaler({.initial_scale = group.rank() == 0 ? 8.0 : 16.0});
    const std::string text = failure_of([&] { (void)scaler.unscale_(std::span(shards)); });
    if (group.world_size() == 1) {
      EXPECT_EQ(text, "");
      return;
    }
    EXPECT_THAT(text,
                HasSubstr("kInvalidArgument: GradScaler: the ranks have scales from 8 to 16"));
    EXPECT_TRUE(shards[0].values.grad().eq(1).all().item<bool>());
  });
}

TEST(GradScaler, LoadsOnlyAStateThatCanGrow) {
  GradScaler scaler({.initial_scale = 8, .growth_interval = 3});
  EXPECT_THAT(failure_of([&] { scaler.load_state({.scale = 8, .num_good_steps = -1}); }),
              HasSubstr("num_good_steps is -1"));
  // The state of a program with a longer growth_interval.
  scaler.load_state({.scale = 8, .num_good_steps = 100});
  EXPECT_TRUE(scaler.unscale_(std::span<const Tensor>()));
  scaler.update();
  EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 16, .num_good_steps = 0}));
}

TEST(GradScaler, CountsATiedWeightOnce) {
  const Tensor weight = torch::zeros({2}).requires_grad_();
  weight.mutable_grad() = torch::full({2}, 16.0F);
  GradScaler scaler({.initial_scale = 4});
  const std::vector<Tensor> twice = {weight, weight};
  EXPECT_TRUE(scaler.unscale_(std::span<const Tensor>(twice)));
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2}, 4.0F)));
}

TEST(GradScaler, GoesOnFromASnapshot) {
  GradScaler scaler({.initial_scale = 8, .growth_interval = 3});
  scaler.load_state({.scale = 32, .num_good_steps = 2});
  EXPECT_TRUE(scaler.unscale_(std::span<const Tensor>()));
  scaler.update();
  EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 64, .num_good_steps = 0}));
}

// Every step is bad, so the scale shrinks. It must stay above 2^-126: below, 1 / scale and every
// gradient would be infinite in float32.
TEST(GradScaler, NeverReachesAScaleThatFloat32CannotInvert) {
  const Tensor weight = torch::zeros({1}).requires_grad_();
  GradScaler scaler({.initial_scale = 1, .backoff_factor = std::ldexp(1.0, -60)});
  for (int step = 0; step < 4; ++step) {
    weight.mutable_grad() = torch::full({1}, std::numeric_limits<float>::infinity());
    const std::vector<Tensor> weights = {weight};
    EXPECT_FALSE(scaler.unscale_(std::span<const Tensor>(weights)));
    scaler.update();
  }
  weight.mutable_grad() = torch::zeros({1});
  const std::vector<Tensor> weights = {weight};
  EXPECT_TRUE(scaler.unscale_(std::span<const Tensor>(weights)));
  EXPECT_EQ(weight.grad().item<float>(), 0);
}

TEST(GradScaler, RefusesAnotherOrderOfCallsAndOptionsOutOfRange) {
  const auto refused = [](const auto& call) { return error_of(call, ErrorCode::kInvalidArgument); };
  GradScaler scaler;
  CountingOptimizer optimizer;
  EXPECT_THAT(refused([&] { scaler.step(optimizer); }), HasSubstr("step() was called before"));
  EXPECT_THAT(refused([&] { scaler.update(); }), HasSubstr("update() was called before"));
  (void)scaler.unscale_(std::span<const Tensor>());
  EXPECT_THAT(refused([&] { (void)scaler.unscale_(std::span<const Tensor>()); }),
              HasSubstr("twice in one step"));
  EXPECT_THAT(refused([] { GradScaler({.initial_scale = 0}); }), HasSubstr("the scale is 0"));
  EXPECT_THAT(refused([] { GradScaler({.growth_factor = 1}); }), HasSubstr("growth_factor is 1"));
  EXPECT_THAT(refused([] { GradScaler({.backoff_factor = 1}); }), HasSubstr("backoff_factor is 1"));
  EXPECT_THAT(refused([] { GradScaler({.growth_interval = 0}); }),
              HasSubstr("growth_interval is 0"));
  EXPECT_THAT(refused([&] { scaler.load_state({.scale = kNotANumber}); }),
              HasSubstr("the scale is nan"));
  EXPECT_EQ(optimizer.num_steps, 0);
}

}  // namespace
}  // namespace cadre::testing
