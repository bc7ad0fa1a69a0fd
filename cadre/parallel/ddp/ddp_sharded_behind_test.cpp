// Tests sharded gradients (ZeRO stage 2) with programs that change memory or gradients without the
// knowledge of the wrapper. The result must be that of replicated gradients, or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/torch/ddp_copies.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(DdpShardedBehind, GradientsFromBeforeAreThoseOfReplicatedOnes) {
  for (const bool is_cleared : {true, false}) {
    const auto result = run_groups(2, [is_cleared](const ProcessGroup& group) {
      std::vector<Seen> seen;
      for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
        const auto net = std::make_shared<Zoo>();
        {
          // All ranks get equal values. Those of the constructor differ, because the rank threads
          // draw from one generator.
          const torch::NoGradGuard no_grad;
          for (Tensor& parameter : net->parameters()) parameter.fill_(0.1);
        }
        net->forward(torch::ones({2, 3}, torch::kLong) * (1 + group.rank()), {true, true})
            .mean()
            .backward();
        Wrapped model{net, group, options_of(placement)};
        const Program program = [is_cleared](const Copy& copy, const auto& compare) {
          if (is_cleared) copy.zero_grad();
          copy.backward(4, 0);
          compare();
        };
        seen.push_back(run_copy(program, model, group));
      }
      require_slices(seen[0], seen[1]);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A backward throws, because it reaches no output of the wrapper, after it has added to some
// gradients. These must not count in the next step.
TEST(DdpShardedBehind, WhatARefusedBackwardLeavesIsNoGradient) {
  const Program program = [](const Copy& copy, const auto& compare) {
    copy.backward(4, 0);
    copy.zero_grad();
    // This backward reaches no output of the wrapper, so it throws.
    const std::string refusal =
        failure_of([&] { (copy.net.side->weight.pow(2).sum() * 1000).backward(); });
    require(!refusal.empty(), "refused");
    copy.zero_grad();
    copy.backward(4, 1);
    compare();
  };
  expect_equal(program, {2, 3});
}

// The program clears the accumulated gradients of some parameters, as if they had their own
// optimizer, and keeps those of the others.
TEST(DdpShardedBehind, ClearingSomeAccumulatedGradientsClearsThese) {
  for (const bool set_to_none : {true, false}) {
    const Program program = [set_to_none](const Copy& copy, const auto& compare) {
      {
        const NoSync guard = copy.model.no_sync();
        copy.backward(4, 0);
      }
      const auto clear = [set_to_none](Tensor tensor) {
        if (!tensor.grad().defined()) return;
        if (set_to_none) {
          tensor.mutable_grad().reset();
        } else {
          tensor.grad().zero_();
        }
      };
      if (copy.is_sharded()) {
        for (const ParameterShard& shard : copy.model.parameter_shards()) {
          if (shard.name.starts_with("up")) clear(shard.values);
        }
      } else {
        for (const Tensor& parameter : copy.net.up->parameters()) clear(parameter);
      }
      copy.backward(4, 1);
      compare();
    };
    expect_equal(program, {1, 2, 3});
  }
}

TEST(DdpShardedBehind, ZeroGradOfTheModuleClearsWhatWasReducedAndWhatWasNot) {
  const Program program = [](const Copy& copy, const auto& compare) {
    copy.backward(4, 0);
    {
      const NoSync guard = copy.model.no_sync();
      copy.backward(4, 1);
    }
    copy.net.zero_grad();
    copy.backward(4, 2);
    compare();
  };
  expect_equal(program, {1, 2});
}

TEST(DdpShardedBehind, ScaledPlaceholdersAreRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Wrapped model{std::make_shared<Zoo>(), group, options_of(GradientPlacement::kSharded)};
    const Copy copy{.model = model, .net = *model.module(), .rank = group.rank(), .world_size = 2};
    {
      const NoSync guard = model.no_sync();
      copy.backward(4, 0);
    }
    if (group.rank() == 1) {
      for (const ParameterShard& shard : model.parameter_shards()) {
        if (shard.values.grad().defined()) shard.values.grad().mul_(1);
      }
    }
    output = failure_of([&] { copy.backward(4, 1); });
    copy.zero_grad();
    copy.backward(4, 2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[1].output, HasSubstr("was changed in place after a backward() under "
                                                "no_sync()"));
  EXPECT_THAT(result.ranks[0].output, HasSubstr("rank 1"));
}

TEST(DdpShardedBehind, ATieByMemoryAcrossBucketsIsRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    const auto net = std::make_shared<Zoo>();
    if (group.rank() == 1) net->down->weight.set_data(net->other->weight.detach());
    output = failure_of([&] { Wrapped(net, group, options_of(GradientPlacement::kSharded)); });
    net->forward(torch::ones({2, 3}, torch::kLong), {true, true});
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("\"other.weight\" and \"down.weight\" share memory"),
                                   HasSubstr("on rank 1 of 2")));
  }
}

// The program writes new values into the shards, for example averaged weights: the next forward of
// all ranks must use them. Then it replaces the memory of the shards: the next forward must throw.
TEST(DdpShardedBehind, ShardsThatTheProgramReplacesOrWrites) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    const auto net = std::make_shared<Zoo>();
    Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
    const Tensor rows = torch::ones({2, 3}, torch::kLong);
    const torch::NoGradGuard no_grad;
    const Tensor before = net->up->weight.detach().clone();
    for (const ParameterShard& shard : model.parameter_shards()) {
      if (shard.memory) shard.values.mul_(2);
    }
    model(rows, std::pair(true, true));
    require(torch::equal(net->up->weight, before * 2), "written values are everywhere");
    for (const ParameterShard& shard : model.parameter_shards()) {
      if (shard.memory) Tensor(shard.values).set_data(shard.values.clone());
    }
    output = failure_of([&] { model(rows, std::pair(true, true)); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("has been given other memory"));
  }
}

// A snapshot reads and writes parameters through their ParameterShards. Those of frozen parameters
// must share the parameters' memory.
TEST(DdpShardedBehind, RecordsOfFrozenParametersAreTheirMemory) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto net = std::make_shared<Zoo>();
    net->frozen->weight.set_data(
        torch::arange(121, torch::kDouble).view({11, 11}).t());  // not contiguous
    Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
    const auto fill = [&](double value) {
      const torch::NoGradGuard no_grad;
      for (const ParameterShard& shard : model.parameter_shards()) {
        if (shard.name == "frozen.weight") shard.values.fill_(value);
      }
      require(net->frozen->weight.eq(value).all().item<bool>(), "written through the record");
    };
    fill(3);
    net->frozen->weight.set_data(torch::zeros({11, 11}, torch::kDouble).t());
    fill(4);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
