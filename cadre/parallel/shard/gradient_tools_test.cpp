// Tests the functions that read and change the gradients of a sharded model: norms, clipping,
// scaling, and the search for values that are not finite. The tests set the gradients of the shards
// by a formula.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns parameters "p0", "p1", ... with these numbers of elements, divided flat over the ranks of
// the group, so that the last ranks may hold no element. The whole gradient of each is ones.
std::vector<ParameterShard> shards_of_ones(const DeviceMesh& mesh,
                                           const std::vector<int64_t>& numels,
                                           torch::ScalarType dtype = torch::kFloat) {
  std::vector<ParameterShard> shards;
  const int64_t num_ranks = mesh.size("shard");
  const int64_t rank = mesh.coordinate("shard");
  for (const int64_t numel : numels) {
    const int64_t part = (numel + num_ranks - 1) / num_ranks;
    const FlatRange range = {std::min(numel, rank * part), std::min(numel, (rank + 1) * part)};
    const Tensor values = torch::zeros({range.size()}, dtype).requires_grad_();
    values.mutable_grad() = torch::ones({range.size()}, dtype);
    shards.push_back({.name = "p" + std::to_string(shards.size()),
                      .sizes = {numel},
                      .mesh = mesh,
                      .placements = std::vector<Placement>(mesh.axes().size(), Replicate()),
                      .flat_axis = "shard",
                      .range = range,
                      .values = values,
                      .parameter = {}});
  }
  return shards;
}

// Sets element `index` of the whole gradient on the rank that owns it.
void set_gradient(const ParameterShard& shard, int64_t index, double value) {
  if (index < shard.range.begin || index >= shard.range.end) return;
  shard.values.mutable_grad()[index - shard.range.begin] = value;
}

class GradientToolsOnRanks : public ::testing::TestWithParam<int> {
 protected:
  void run(const std::function<void(const ProcessGroup&)>& rank) const {
    const auto result =
        run_groups(GetParam(), [&](const ProcessGroup& group, std::string&) { rank(group); });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, GradientToolsOnRanks, ::testing::Values(1, 2, 3, 4));

TEST_P(GradientToolsOnRanks, NameTheFirstParameterThatIsNotFiniteAndItsLowestRank) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {5, 1, 7});
    EXPECT_EQ(find_nonfinite_gradient(shards), std::nullopt);
    EXPECT_TRUE(check_gradients_finite(std::span(shards)));
    set_gradient(shards[2], 6, kInfinity);
    const int holder_of_6 = 6 / ((7 + group.world_size() - 1) / group.world_size());
    EXPECT_EQ(
        find_nonfinite_gradient(shards),
        (NonFiniteGradient{.parameter = "p2",
                           .rank = group.world_size() == 1 ? std::optional<int>() : holder_of_6}));
    set_gradient(shards[2], 0, -kInfinity);
    set_gradient(shards[1], 0, kNan);
    EXPECT_EQ(find_nonfinite_gradient(shards),
              (NonFiniteGradient{.parameter = "p1",
                                 .rank = group.world_size() == 1 ? std::optional<int>() : 0}));
  });
}

TEST_P(GradientToolsOnRanks, DecideAlikeWhatBecomesOfAStep) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {4});
    set_gradient(shards[0], 3, kNan);
    EXPECT_THAT(
        error_of([&] { check_gradients_finite(std::span(shards), {.step = 17}); },
                 ErrorCode::kInvalidArgument),
        HasSubstr("step 17: the gradient of \"p0\" has an element that is NaN or infinite"));
    LogLines log;
    EXPECT_FALSE(check_gradients_finite(
        std::span(shards), {.policy = NonFinitePolicy::kSkip, .step = 18, .log = &log}));
    EXPECT_THAT(log.get(),
                ::testing::ElementsAre(HasSubstr("gradients step 18: the gradient of \"p0\"")));
    EXPECT_TRUE(check_gradients_finite(std::span(shards),
                                       {.policy = NonFinitePolicy::kContinue, .log = &log}));
  });
}

// A rank whose part of a parameter has no gradient contributes zeros.
TEST_P(GradientToolsOnRanks, GatherGradientsThatSomeRanksHave) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {8, 4});
    if (group.rank() > 0) shards[0].values.mutable_grad().reset();
    shards[1].values.mutable_grad().reset();
    const std::vector<NamedTensor> gradients = shard::gather_gradients(shards, group);
    Tensor expected = torch::zeros({8});
    expected.narrow(0, 0, (8 + group.world_size() - 1) / group.world_size()).fill_(1);
    EXPECT_TRUE(torch::equal(gradients[0].tensor, expected)) << gradients[0].tensor;
    EXPECT_FALSE(gradients[1].tensor.defined());
  });
}

// A wrapper whose gradients are whole on every rank.
struct WholeModel {
  std::shared_ptr<torch::nn::LinearImpl> net = std::make_shared<torch::nn::LinearImpl>(2, 1);
  const auto& module() const { return net; }
  std::vector<Tensor> parameters() const { return net->parameters(); }
};

TEST(GradientTools, TakeAModelWhoseGradientsAreWhole) {
  WholeModel model;
  for (Tensor& parameter : model.parameters()) {
    parameter.mutable_grad() = torch::full_like(parameter, 8.0);
  }
  EXPECT_TRUE(check_gradients_finite(model));
  GradScaler scaler({.initial_scale = 4});
  EXPECT_TRUE(scaler.unscale_(model));
  EXPECT_EQ(model.net->weight.grad()[0][1].item<double>(), 2);
  EXPECT_NEAR(clip_grad_norm_(model, 1.0), std::sqrt(12.0), 1e-6);
  model.net->bias.mutable_grad().fill_(kNan);
  EXPECT_THAT(
      error_of([&] { check_gradients_finite(model, {.step = 3}); }, ErrorCode::kInvalidArgument),
      HasSubstr("step 3: the gradient of \"bias\" has an element that is NaN or infinite. Lower"));
  scaler.update();
  EXPECT_FALSE(scaler.unscale_(model));
}

// A wrapper with a group, like DistributedDataParallel. Its rank 0 logs warnings for all ranks.
struct GroupedModel : WholeModel {
  const ProcessGroup& process_group() const { return group; }
  ProcessGroup group;
};

TEST(GradientTools, WarnInTheLogOfTheGroupUnlessToldAnother) {
  const auto lines =
      ::testing::ElementsAre(HasSubstr("effect=\"the step is left out on all ranks\""));
  const auto log_of_group = std::make_shared<LogLines>();
  const auto result = run_groups(
      2,
      [](const ProcessGroup& group, std::string&) {
        const DeviceMesh mesh(group, {{"shard", 2}});
        const auto shards = shards_of_ones(mesh, {4});
        set_gradient(shards[0], 3, kNan);
        EXPECT_FALSE(check_gradients_finite(std::span(shards), {.policy = NonFinitePolicy::kSkip}));
      },
      log_of_group);
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(log_of_group->get(), lines);

  const auto log_of_wrapped = std::make_shared<LogLines>();
  const auto wrapped = run_groups(
      2,
      [](const ProcessGroup& group, std::string&) {
        GroupedModel model{{}, group};
        model.net->weight.mutable_grad() = torch::full_like(model.net->weight, kNan);
        EXPECT_FALSE(check_gradients_finite(model, {.policy = NonFinitePolicy::kSkip}));
      },
      log_of_wrapped);
  EXPECT_TRUE(wrapped.ok()) << wrapped.failures();
  EXPECT_THAT(log_of_wrapped->get(), lines);
}

// In a list of tensors, shards look like any other tensors, and the result would be that of one
// rank's shards. So they are refused.
TEST_P(GradientToolsOnRanks, RefuseAListOfShards) {
  run([](const ProcessGroup& group) {
    const FlatParameters flat({{"w", torch::ones({3, 5}).requires_grad_()}}, group,
                              {.name = "of unit \"u\" of Wrapper"});
    const std::vector<Tensor> leaves = {torch::ones({2}), flat.values(0)};
    for (const Tensor& leaf : leaves) leaf.mutable_grad() = torch::ones_like(leaf);
    const std::string what = cadre::format(
        ", rank {}: parameter 1 of 2 in the list is this rank's shard of \"w\", of unit \"u\" of "
        "Wrapper, so the list has other gradients on each rank, and the ranks would come to "
        "different results. Call ",
        group.rank());
    EXPECT_EQ(
        error_of([&] { clip_grad_norm_(std::span(leaves), 1.0); }, ErrorCode::kInvalidArgument),
        "clip_grad_norm_" + what +
            "clip_grad_norm_(model, max_norm) with the wrapper or the pipeline or, after "
            "parallelize_module(), "
            "clip_grad_norm_(records, max_norm) with the records that it returned: both add up "
            "the shards of all ranks");
    GradScaler scaler;
    EXPECT_EQ(
        error_of([&] { scaler.unscale_(std::span(leaves)); }, ErrorCode::kInvalidArgument),
        "GradScaler::unscale_" + what + "unscale_(model) with the wrapper, which asks all ranks");
    EXPECT_NE(wrap::shard_mark_of(flat.values(0).detach()), nullptr);
    EXPECT_EQ(wrap::shard_mark_of(flat.values(0) * 2), nullptr);
    EXPECT_EQ(wrap::shard_mark_of(flat.values(0).grad()), nullptr);
  });
}

// The parameters are 0 and their gradients are 1 times the scale, so SGD of rate 1 leaves -1.
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
    set_gradient(shards[0], 7, kInfinity);  // the last rank owns this element
    EXPECT_FALSE(scaler.unscale_(std::span(shards)));
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(optimizer.num_steps, 1);
    // The growth interval starts again: the good step before the bad one no longer counts.
    EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 4, .num_good_steps = 0}));
  });
}

// float16's smallest number is 2^-24, so a gradient of 2^-20 becomes 0 if it is multiplied by 2^-6.
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

// 2^-14 is the smallest normal number of float16. Smaller numbers lose digits, and numbers below
// 2^-25 become 0.
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
  EXPECT_NE(unscale(scaler, std::ldexp(1.0 + 0x1p-10, -1)), "") << "digits of 2^-17 are lost";
  EXPECT_EQ(unscale(scaler, 8.0), "");
  scaler.update();
  EXPECT_EQ(unscale(scaler, std::ldexp(1.0, -1)), "") << "2^-17 is held exactly";
}

// A gradient that only one rank owns decides for all ranks, before any rank changes a gradient.
TEST_P(GradientToolsOnRanks, ScalerRefusesWhatFloat16CannotHoldOnAllRanks) {
  run([](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", group.world_size()}});
    const auto shards = shards_of_ones(mesh, {8, 8}, torch::kHalf);
    set_gradient(shards[1], 7, std::ldexp(1.0, -16));  // the last rank owns this element
    GradScaler scaler({.initial_scale = 1024});
    const std::string text = failure_of([&] { (void)scaler.unscale_(std::span(shards)); });
    EXPECT_THAT(text, HasSubstr("the gradient of \"p1\" is Half"));
    const Tensor first = shards[0].values.grad();
    EXPECT_TRUE(first.eq(1).all().item<bool>()) << first;
    set_gradient(shards[1], 7, 2);
    EXPECT_TRUE(scaler.unscale_(std::span(shards))) << "the order of calls is as before";
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
  // The state was saved with a longer growth interval.
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

// Without an upper bound of the scale 1 / scale would become infinite in float32, and so would
// every gradient.
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
  EXPECT_THAT(refused([] { GradScaler({.backoff_factor = 1}); }), HasSubstr("backoff_factor 1"));
  EXPECT_THAT(refused([] { GradScaler({.growth_interval = 0}); }), HasSubstr("growth_interval 0"));
  EXPECT_THAT(refused([&] { scaler.load_state({.scale = kNan}); }), HasSubstr("the scale is nan"));
  EXPECT_EQ(optimizer.num_steps, 0);
}

}  // namespace
}  // namespace cadre::testing
