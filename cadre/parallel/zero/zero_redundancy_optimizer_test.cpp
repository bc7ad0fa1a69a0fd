// Tests the state of a ZeRO optimizer, when it waits for gathers, and its errors.
// zero_groups_test.cpp tests its parameter groups.
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/zero_gradients.h"
#include "cadre/testing/torch/zero_net.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::reduce_gradients;
using testing::require;
using testing::run_groups;
using testing::ShardedGradientsModel;
using torch::Tensor;
using zero_net::groups_of;
using zero_net::input_of;
using zero_net::kManyBuckets;
using zero_net::Net;
using zero_net::options;
using zero_net::require_same;
using zero_net::train_step;
using zero_net::values_of;

int64_t step_of(const ParameterState& state) {
  return state.scalars.at(0).tensor.item<int64_t>();
}

TEST(ZeroRedundancyOptimizer, CallsTheClosureOnce) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Net plain_net;
    Net net;
    SGD plain(plain_net.named_parameters(), torch::optim::SGDOptions(0.1));
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, torch::optim::SGDOptions(0.1),
                                      kManyBuckets);
    train_step(plain_net, group, plain, 0);
    int num_calls = 0;
    const Tensor loss = zero.step([&] {
      ++num_calls;
      zero.zero_grad();
      Tensor value = net.forward(input_of(0, group.rank()), true);
      value.backward();
      reduce_gradients(net, group, 0.5);
      return value;
    });
    require(num_calls == 1 && loss.defined(), "one call");
    require_same(net, plain_net, "after the closure");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The optimizer and the mesh of its group are destroyed while all_gathers of a step may still be in
// flight.
TEST(ZeroRedundancyOptimizer, AMeshEndsAfterAStepThatNobodyHasWaitedFor) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    {
      const DeviceMesh mesh(world, {{"a", 2}, {"b", 2}});
      const ProcessGroup group = mesh.group("b");
      Net net;
      ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group,
                                        torch::optim::SGDOptions(0.1), kManyBuckets);
      train_step(net, group, zero, 0);
    }
    world.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The saved state must equal that of the plain optimizer, with the original sizes, and any number
// of ranks must be able to load it.
TEST(ZeroRedundancyOptimizer, StateGoesFromAnyNumberOfRanksToAnyOther) {
  for (const int from : {1, 2, 3, 8}) {
    std::vector<ParameterState> saved;
    std::vector<Tensor> values;
    const auto result = run_groups(from, [&](const ProcessGroup& group) {
      Net plain_net;
      Net net;
      AdamW plain(plain_net.named_parameters(), options());
      ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, options(), kManyBuckets);
      for (int step = 0; step < 3; ++step) {
        train_step(plain_net, group, plain, step);
        train_step(net, group, zero, step);
      }
      const auto states = zero.state_dict();
      require(states.size() == 7, "all that are trained: " + std::to_string(states.size()));
      for (const ParameterState& state : states) {
        const Tensor parameter = plain_net.named_parameters()[state.parameter];
        const auto& expected = static_cast<const torch::optim::AdamWParamState&>(
            *plain.state().at(parameter.unsafeGetTensorImpl()));
        require(step_of(state) == expected.step(), "step of " + state.parameter);
        require(state.tensors.size() == 2 && state.tensors[0].name == "exp_avg" &&
                    state.tensors[1].name == "exp_avg_sq",
                state.parameter);
        require(torch::equal(state.tensors[0].tensor, expected.exp_avg()), state.parameter);
        require(torch::equal(state.tensors[1].tensor, expected.exp_avg_sq()), state.parameter);
      }
      const auto on_last = zero.state_dict(group.world_size() - 1);
      const bool is_last = group.rank() == group.world_size() - 1;
      require(on_last.empty() != is_last, "on one rank only");
      if (!is_last) return;
      saved = on_last;
      values = values_of(net);
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (const int to : {1, 2, 4}) {
      const auto resumed = run_groups(to, [&](const ProcessGroup& group) {
        Net plain_net;
        Net net;
        for (Net* each : {&plain_net, &net}) {
          const torch::NoGradGuard no_grad;
          for (size_t i = 0; i < values.size(); ++i) each->parameters()[i].copy_(values[i]);
        }
        ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), group, options());
        // The reference is the same optimizer in a group of one rank, where it is not divided.
        const ProcessGroup alone = init_process_group();
        ZeroRedundancyOptimizer<AdamW> plain(plain_net.named_parameters(), alone, options());
        zero.load_state_dict(saved);
        plain.load_state_dict(saved);
        for (int step = 3; step < 6; ++step) {
          train_step(plain_net, group, plain, step);
          train_step(net, group, zero, step);
        }
        require_same(net, plain_net, "resumed");
        for (const ParameterState& state : zero.state_dict()) {
          // The layer "in" is in the list twice, so each step updates it twice, as in torch::optim.
          // The layer "rare" has gradients in 4 of 6 steps.
          const int64_t expected = state.parameter.starts_with("rare")
                                       ? 4
                                       : (state.parameter.starts_with("in") ? 12 : 6);
          require(step_of(state) == expected, "step of " + state.parameter);
        }
      });
      EXPECT_TRUE(resumed.ok()) << from << " to " << to << ": " << resumed.failures();
    }
  }
}

TEST(ZeroRedundancyOptimizer, RefusesAStateOfOthers) {
  const ProcessGroup alone = init_process_group();
  Net net;
  ZeroRedundancyOptimizer<AdamW> zero(net.named_parameters(), alone, options());
  const auto refusal = [&](const ParameterState& state) {
    return failure_of([&] { zero.load_state_dict(std::vector<ParameterState>{state}); });
  };
  const Tensor ones = torch::ones({7, 5});
  const std::vector<NamedTensor> step = {{"step", torch::tensor(int64_t{1})}};
  EXPECT_THAT(refusal({.parameter = "fc", .scalars = step}),
              HasSubstr("\"fc\", which does not belong to this"));
  EXPECT_THAT(
      refusal({.parameter = "in.weight", .tensors = {{"momentum_buffer", ones}}, .scalars = step}),
      HasSubstr("has 1 tensors, of which this optimizer has 0"));
  EXPECT_THAT(refusal({.parameter = "in.weight",
                       .tensors = {{"exp_avg", ones}, {"exp_avg_sq", ones}, {"sum", ones}},
                       .scalars = step}),
              HasSubstr("has 3 tensors, of which this optimizer has 2"));
  EXPECT_THAT(
      refusal({.parameter = "in.weight", .tensors = {{"exp_avg", ones}, {"exp_avg_sq", ones}}}),
      HasSubstr("has no step"));
  EXPECT_THAT(
      refusal({.parameter = "in.weight", .tensors = {{"exp_avg", ones.t()}}, .scalars = step}),
      HasSubstr("\"exp_avg\" of \"in.weight\" has sizes (5, 7), expected (7, 5)"));
  const ParameterState given{.parameter = "in.weight",
                             .tensors = {{"exp_avg", ones}, {"exp_avg_sq", ones}},
                             .scalars = step};
  ParameterState before_the_first = given;
  before_the_first.scalars = {{"step", torch::tensor(int64_t{-1})}};
  EXPECT_THAT(refusal(before_the_first), HasSubstr("counts -1 steps; expected 0 or more"));
  EXPECT_THAT(failure_of([&] {
                zero.load_state_dict(std::vector<ParameterState>{given, given});
              }),
              HasSubstr("the state of \"in.weight\" is given twice"));
  EXPECT_TRUE(zero.state_dict().empty());
  zero.load_state_dict(std::vector<ParameterState>{given});
  EXPECT_EQ(zero.state_dict().size(), 1U);
  for (const int rank : {-1, 1}) {
    EXPECT_THAT(failure_of([&] { zero.state_dict(rank); }),
                HasSubstr("expected a rank from 0 to 0"));
  }
  zero.load_state_dict({});  // an empty list removes all states
  EXPECT_TRUE(zero.state_dict().empty());
}

TEST(ZeroRedundancyOptimizer, ParametersArriveWhenTheProgramWaits) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Net net;
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, torch::optim::SGDOptions(0.1),
                                      {.wait_in_step = false});
    train_step(net, group, zero, 0);
    const std::string failure = failure_of([&] { net.in->weight.sum(); });
    require(failure.find("are being gathered from the other ranks. To use them, call wait() of the "
                         "optimizer") != std::string::npos,
            failure);
    zero.wait();
    zero.wait();
    net.in->weight.sum();
    zero.step();  // does not wait for the gathers
    zero.step();
    zero.wait();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ZeroRedundancyOptimizer, StepsTheShardsOfAWrapper) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    Net plain_net;
    const auto net = std::make_shared<Net>();
    ShardedGradientsModel model(net, group);
    AdamW plain(groups_of(plain_net), options());
    ZeroRedundancyOptimizer<AdamW> zero(model, groups_of(*net), options());
    require(zero.stage() == ZeroStage::kShardedGradients, "stage 2");
    for (int step = 0; step < 4; ++step) {
      train_step(plain_net, group, plain, step);
      zero.zero_grad();
      for (const ParameterShard& shard : model.parameter_shards()) {
        require(!shard.values.grad().defined(), "cleared " + shard.name);
      }
      model.before_forward();
      net->forward(input_of(step, group.rank()), step % 3 != 2).backward();
      model.reduce(1.0 / 3);
      const Tensor before = model.parameter_shards()[0].values.grad().clone();
      zero.step();
      require(torch::equal(model.parameter_shards()[0].values.grad(), before), "it stays");
      const std::string failure = failure_of([&] { net->in->weight.sum(); });
      require(failure.find("are being gathered") != std::string::npos, failure);
      model.before_forward();
      require_same(*net, plain_net, "step " + std::to_string(step));
    }
    require(zero.state_dict().size() == 7, "state");
    Net other;
    const std::string refusal = failure_of(
        [&] { ZeroRedundancyOptimizer<AdamW> wrong(model, groups_of(other), options()); });
    require(refusal.find("is none of the") != std::string::npos, refusal);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ZeroRedundancyOptimizer, SaysWhatEachRankSteps) {
  const auto result = run_groups(4, [](const ProcessGroup& group) {
    Net net;
    const auto values = values_of(net);
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, torch::optim::SGDOptions(0.1),
                                      kManyBuckets);
    int64_t numel = 0;
    for (const ParameterShard& shard : zero.parameter_shards()) {
      require(shard.range.size() == shard.values.numel(), shard.name);
      const Tensor flat = net.named_parameters()[shard.name].detach().flatten();
      require(torch::equal(shard.values, flat.slice(0, shard.range.begin, shard.range.end)),
              shard.name);
      numel += shard.range.size();
    }
    const Tensor total = torch::full({}, numel);
    group.all_reduce(total);
    require(total.item<int64_t>() == 35 + 7 + 35 + 5 + 21 + 3 + 1, "every element once");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A wrapper with whole gradients, as far as the optimizer needs one: a module and a process group.
struct ReplicatedModel {
  const std::shared_ptr<Net>& module() const { return net; }
  const ProcessGroup& process_group() const { return group; }
  std::shared_ptr<Net> net;
  ProcessGroup group;
};

TEST(ZeroRedundancyOptimizer, StepsAWrapperOfWholeGradients) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    Net plain_net;
    ReplicatedModel model{std::make_shared<Net>(), group};
    AdamW plain(groups_of(plain_net), options());
    ZeroRedundancyOptimizer<AdamW> zero(model, groups_of(*model.net), options(), kManyBuckets);
    require(zero.stage() == ZeroStage::kReplicatedGradients, "stage 1");
    for (int step = 0; step < 3; ++step) {
      train_step(plain_net, group, plain, step);
      train_step(*model.net, group, zero, step);
    }
    require_same(*model.net, plain_net, "three steps");
    require(zero.parameter_shards()[0].mesh.to_string() == "{shard: 3}", "a mesh");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The gradients are not reduced, so they differ between the ranks. The first step must throw.
TEST(ZeroRedundancyOptimizer, NoticesGradientsThatNobodyReduced) {
  const auto result = run_groups(3, [](const ProcessGroup& group, std::string& output) {
    Net net;
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, torch::optim::SGDOptions(0.1));
    const Net before;
    net.forward(input_of(0, group.rank()), true).backward();
    output = failure_of([&] { zero.step(); });
    require_same(net, before, "nothing was stepped");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("ranks 0 and 1 have different gradients of \"scale\""));
  }
}

// The gradients of the fourth step are not reduced. The step must throw, because every step
// compares sampled elements.
TEST(ZeroRedundancyOptimizer, NoticesALaterStepThatNobodyReduced) {
  const auto result = run_groups(3, [](const ProcessGroup& group, std::string& output) {
    Net net;
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) train_step(net, group, zero, step);
    const std::vector<Tensor> before = values_of(net);
    zero.zero_grad();
    net.forward(input_of(3, group.rank()), true).backward();
    output = failure_of([&] { zero.step(); });
    for (size_t i = 0; i < before.size(); ++i) {
      require(torch::equal(net.parameters()[i], before[i]), "nothing was stepped");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("ranks 0 and 1 have different gradients of \"scale\""));
  }
}

TEST(ZeroRedundancyOptimizer, SaysWhichRankLeftOutAStep) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Net net;
    ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), group, torch::optim::SGDOptions(0.1));
    train_step(net, group, zero, 0);
    const std::string failure = failure_of([&] {
      if (group.rank() == 0) zero.step();
      const Tensor other = torch::ones({3});
      group.all_reduce(other);
    });
    require(failure.find("all_reduce") != std::string::npos, failure);
    if (group.rank() == 0) {
      require(
          failure.find("ZeroRedundancyOptimizer of cadre::SGD, rank 0, in its step 2: the ranks "
                       "are not at the same place of the same step") != std::string::npos,
          failure);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ZeroRedundancyOptimizer, RefusesWhatItCannotDivide) {
  const ProcessGroup alone = init_process_group();
  const auto make = [&](const Net& of, const Net& groups) {
    ZeroRedundancyOptimizer<SGD> zero(of.named_parameters(), alone, groups_of(groups),
                                      torch::optim::SGDOptions(0.1));
  };
  Net net;
  Net other;
  EXPECT_THAT(failure_of([&] { make(net, other); }),
              HasSubstr("none of the 8 parameters that the optimizer was made for"));
  Net transposed;
  transposed.out->weight.set_data(torch::ones({7, 5}).t());
  EXPECT_THAT(failure_of([&] { make(transposed, transposed); }),
              HasSubstr("\"out.weight\" is not contiguous"));
  const auto deferred = defer_init([] { return std::make_shared<Net>(); });
  EXPECT_THAT(
      failure_of([&] { make(*deferred, *deferred); }),
      HasSubstr("is on the meta device and has no values; call cadre::materialize(module)"));
  ZeroRedundancyOptimizer<SGD> zero(net.named_parameters(), alone, torch::optim::SGDOptions(0.1));
  net.frozen.requires_grad_(true);
  net.forward(input_of(0, 0), true).backward();
  EXPECT_THAT(failure_of([&] { zero.step(); }),
              HasSubstr("was frozen when the optimizer was made"));
  net.frozen.mutable_grad().reset();
  net.to(torch::kDouble);
  EXPECT_THAT(failure_of([&] { zero.step(); }), HasSubstr("has been given other memory"));
}

}  // namespace
}  // namespace cadre
