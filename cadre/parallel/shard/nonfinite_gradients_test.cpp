// Tests the search for gradients that are not finite, and which models and lists the functions on
// gradients accept. The gradients of the shards are set by a formula.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/nonfinite_gradients.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/shards_of_ones.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::testing {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

// A wrapper with whole gradients on every rank.
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

// A wrapper with a process group, like DistributedDataParallel. Only rank 0 of the group writes the
// warning.
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
      {.log = log_of_group});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(log_of_group->get(), lines);

  const auto log_of_wrapped = std::make_shared<LogLines>();
  const auto wrapped =
      run_groups(2,
                 [](const ProcessGroup& group, std::string&) {
                   GroupedModel model{{}, group};
                   model.net->weight.mutable_grad() = torch::full_like(model.net->weight, kNan);
                   EXPECT_FALSE(check_gradients_finite(model, {.policy = NonFinitePolicy::kSkip}));
                 },
                 {.log = log_of_wrapped});
  EXPECT_TRUE(wrapped.ok()) << wrapped.failures();
  EXPECT_THAT(log_of_wrapped->get(), lines);
}

// Functions that take a list of whole parameters must throw if one of them is a shard, because they
// would compute the result of one rank's shards only.
TEST_P(GradientToolsOnRanks, RefuseAListOfShards) {
  run([](const ProcessGroup& group) {
    const shard::FlatParameters flat({{"w", torch::ones({3, 5}).requires_grad_()}}, group,
                                     {.name = "of unit \"u\" of Wrapper"});
    const std::vector<Tensor> leaves = {torch::ones({2}), flat.values(0)};
    for (const Tensor& leaf : leaves) leaf.mutable_grad() = torch::ones_like(leaf);
    const auto refusal = [&](const std::string& call, const std::string& arguments) {
      return cadre::format(
          "{0}: parameter 1 of 2 in the list is this rank's shard of \"w\", of unit \"u\" of "
          "Wrapper (rank {2} of the {3} that divide it), so the list has other gradients on each "
          "rank, and the ranks would come to different results. Call {0}(model{1}) with the "
          "wrapper or the pipeline that made the shards. For a module that parallelize_module() "
          "has divided, also within DistributedDataParallel, call {0}(records{1}) with the records "
          "that parallelize_module() returned",
          call, arguments, group.rank(), group.world_size());
    };
    EXPECT_EQ(
        error_of([&] { clip_grad_norm_(std::span(leaves), 1.0); }, ErrorCode::kInvalidArgument),
        refusal("clip_grad_norm_", ", max_norm"));
    GradScaler scaler;
    EXPECT_EQ(error_of([&] { scaler.unscale_(std::span(leaves)); }, ErrorCode::kInvalidArgument),
              refusal("GradScaler::unscale_", ""));
    // check_gradients_finite() must throw for a shard: only the rank whose shard is not finite
    // would skip the step.
    const std::vector<NamedTensor> named = {{"b", leaves[0]}, {"w", leaves[1]}};
    EXPECT_EQ(
        error_of([&] { check_gradients_finite(std::span(named)); }, ErrorCode::kInvalidArgument),
        refusal("check_gradients_finite", ""));
    EXPECT_NE(wrap::shard_mark_of(flat.values(0).detach()), nullptr);
    EXPECT_EQ(wrap::shard_mark_of(flat.values(0) * 2), nullptr);
    EXPECT_EQ(wrap::shard_mark_of(flat.values(0).grad()), nullptr);
  });
}

}  // namespace
}  // namespace cadre::testing
