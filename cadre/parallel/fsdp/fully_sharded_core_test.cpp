// Tests FullyShardedDataParallel with frozen, tied and ignored parameters, gradient accumulation,
// mixed precision and meshes. The results must equal those of the plain module in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Options = FullyShardedDataParallelOptions;

TEST(FsdpParameters, KeepTheirNamesAndAreRecorded) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Tower>(1);
    fully_shard(module->units[0]);
    const FullyShardedDataParallel model{module, group};
    EXPECT_THAT(module->named_parameters().keys(),
                ElementsAre("unit0.weight", "unit0.bias", "head.weight", "head.bias"));
    EXPECT_EQ(module->units[0]->weight.sizes(), (std::vector<int64_t>{kWidth, kWidth}));
    std::vector<std::string> names;
    for (const ParameterShard& shard : model.parameter_shards()) names.push_back(shard.name);
    EXPECT_EQ(names, module->named_parameters().keys());
    EXPECT_EQ(model.parameters().size(), 4);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpParameters, MayBeFrozenUnusedOrTied) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    Options options = every_unit();
    options.reshard = reshard;
    expect_trains_as_plain([] { return std::make_shared<Special>(); }, options);
  }
}

TEST(FsdpParameters, OfTwoDtypesAreShardedApart) {
  const Snapshot expected = train_plain(std::make_shared<MixedTower>(), PlainSteps{});
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{std::make_shared<MixedTower>(), group, every_unit()};
    expect_equal(train_wrapped(model, group, PlainSteps{}), expected, 1e-6);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpParameters, ThatAreIgnoredStayAsTheyAre) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Tower>(2);
    Options options = every_unit();
    options.ignored = {"unit1", "head.bias"};
    FullyShardedDataParallel model{module, group, options};
    EXPECT_EQ(model.parameters().size(), 3);
    model(rows_of(group, 0)).pow(2).mean().backward();
    EXPECT_TRUE(module->units[1]->weight.sum().defined());
    const auto plain = std::make_shared<Tower>(2);
    plain->forward(rows_of(group, 0)).pow(2).mean().backward();
    EXPECT_TRUE(torch::allclose(module->head->bias.grad(), plain->head->bias.grad()))
        << "this rank's, not reduced";
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpAccumulation, WithAndWithoutReduction) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    Options options = every_unit();
    options.reshard = reshard;
    options.reshard_root = reshard;
    options.weighting = GradientWeighting::kEqual;
    const auto make = [] { return std::make_shared<Tower>(3); };
    expect_trains_as_plain(make, options, Accumulation<false>{});
    expect_trains_as_plain(make, options, Accumulation<true>{});
  }
}

TEST(FsdpAccumulation, GathersOnceForAllBackwardsUntilTheReduction) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto num_gathers = [&](Reshard reshard) {
      parallel::ShardGroups groups = parallel::ShardGroups::of(group);
      const FakeGroup counted(group);
      int count = 0;
      counted.on_call = [&count](GroupCall& call) {
        if (call.kind == OpKind::kAllGather && call.is_of_values()) ++count;
        call.pass_on();
      };
      groups.all = counted.group();
      Options options = every_unit();
      options.reshard = options.reshard_root = reshard;
      options.weighting = GradientWeighting::kEqual;
      FullyShardedDataParallel model{std::make_shared<Tower>(3), groups, options};
      train_wrapped(model, group, Accumulation<false>{});
      return count / kTowerSteps;
    };
    EXPECT_EQ(num_gathers(Reshard::kAfterReduction), 4);
    EXPECT_EQ(num_gathers(Reshard::kAfterBackward), 2 * 4);
    EXPECT_EQ(num_gathers(Reshard::kAfterForward), 4 * 4);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpAccumulation, TwoForwardsBeforeTwoBackwards) {
  const auto step = [](auto& model, const Tensor& rows) {
    const Tensor first = model.forward(rows).pow(2).mean();
    const Tensor second = model.forward(rows.flip(1)).mean();
    second.backward();
    first.backward();
  };
  Options options = every_unit();
  options.weighting = GradientWeighting::kEqual;
  expect_trains_as_plain([] { return std::make_shared<Tower>(3); }, options, step, {2});
  const auto together = [](auto& model, const Tensor& rows) {
    const Tensor first = model.forward(rows).pow(2).mean();
    (model.forward(rows.flip(1)).mean() + first).backward();
  };
  expect_trains_as_plain([] { return std::make_shared<Tower>(3); }, options, together, {2});
}

// The program writes values into the shards between forwards, as load_sharded() does. The next
// forward must use them, also if no gradient was ever reduced.
TEST(FsdpStale, ValuesThatTheProgramWritesAreUsedByTheNextForward) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      Options options = every_unit();
      options.reshard = options.reshard_root = reshard;
      FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
      const auto plain = std::make_shared<Tower>(2);
      const torch::NoGradGuard no_grad;
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(torch::allclose(model(data_of(9)), plain->forward(data_of(9)), 1e-12, 1e-12));
        for (const Tensor& values : model.parameters()) values.mul_(0.5);
        for (const Tensor& parameter : plain->parameters()) parameter.mul_(0.5);
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Units stay full after a backward under no_sync(), and the program then writes into the shards.
// summon_full_params() must return the new values.
TEST(FsdpStale, ValuesThatTheProgramWritesAreThoseThatAreSummoned) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Options options = every_unit();
    options.reshard = options.reshard_root = Reshard::kAfterReduction;
    const auto module = std::make_shared<Tower>(2);
    FullyShardedDataParallel model{module, group, options};
    const auto plain = std::make_shared<Tower>(2);
    {
      const NoSync no_sync = model.no_sync();
      model(data_of(9)).sum().backward();
    }
    const torch::NoGradGuard no_grad;
    for (const Tensor& values : model.parameters()) values.mul_(0.5);
    for (const Tensor& parameter : plain->parameters()) parameter.mul_(0.5);
    const auto full = model.summon_full_params();
    const auto parameters = module->named_parameters();
    for (const auto& item : plain->named_parameters()) {
      EXPECT_TRUE(torch::equal(parameters[item.key()], item.value())) << item.key();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The program writes into the shards between accumulated backwards, for example to clamp the
// weights. The next forward must use the new values.
TEST(FsdpStale, ValuesWrittenBetweenBackwardsWithoutReductionAreUsed) {
  for (const Reshard reshard : {Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      Options options = every_unit();
      options.reshard = options.reshard_root = reshard;
      FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
      const auto plain = std::make_shared<Tower>(2);
      for (int i = 0; i < 3; ++i) {
        const NoSync no_sync = model.no_sync();
        model(rows_of(group, i)).pow(2).mean().backward();
        const torch::NoGradGuard no_grad;
        for (const Tensor& values : model.parameters()) values.mul_(0.5);
        for (const Tensor& parameter : plain->parameters()) parameter.mul_(0.5);
        EXPECT_TRUE(torch::allclose(model(data_of(9)), plain->forward(data_of(9)), 1e-12, 1e-12));
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A backward under no_sync() runs between a reducing backward and the step. The forward after the
// step must nevertheless use the new values.
TEST(FsdpStale, ABackwardWithoutReductionBeforeTheStepKeepsNothing) {
  for (const Reshard reshard : {Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      Options options = every_unit();
      options.reshard = options.reshard_root = reshard;
      options.weighting = GradientWeighting::kEqual;
      FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
      const auto plain = std::make_shared<Tower>(2);
      torch::optim::SGD sgd(model.parameters(), 0.1);
      torch::optim::SGD plain_sgd(plain->parameters(), 0.1);
      for (int i = 0; i < 3; ++i) {
        sgd.zero_grad();
        plain_sgd.zero_grad();
        model(rows_of(group, i)).pow(2).mean().backward();
        plain->forward(data_of(i)).pow(2).mean().backward();
        {
          const NoSync no_sync = model.no_sync();
          model(rows_of(group, i)).pow(2).mean().backward();
        }
        sgd.step();
        plain_sgd.step();
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::allclose(model(data_of(9)), plain->forward(data_of(9)), 1e-12, 1e-12));
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// An evaluation between backward and step must use the old values, and each evaluation after the
// step the new ones.
TEST(FsdpStale, EveryUseAfterAStepGathersAgain) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      Options options = every_unit();
      options.reshard = options.reshard_root = reshard;
      FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
      const auto plain = std::make_shared<Tower>(2);
      torch::optim::SGD sgd(model.parameters(), 0.1);
      torch::optim::SGD plain_sgd(plain->parameters(), 0.1);
      const auto expect_same_outputs = [&] {
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::allclose(model(data_of(9)), plain->forward(data_of(9)), 1e-12, 1e-12));
      };
      for (int i = 0; i < 3; ++i) {
        expect_same_outputs();
        sgd.zero_grad();
        plain_sgd.zero_grad();
        model(rows_of(group, i)).pow(2).mean().backward();
        plain->forward(data_of(i)).pow(2).mean().backward();
        expect_same_outputs();
        sgd.step();
        plain_sgd.step();
        expect_same_outputs();
        expect_same_outputs();
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FsdpSummon, ShowsAndTakesThePlainParameters) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Tower>(2);
    FullyShardedDataParallel model{module, group, every_unit()};
    const auto plain = std::make_shared<Tower>(2);
    const auto expect_same = [&] {
      const auto parameters = module->named_parameters();
      for (const auto& item : plain->named_parameters()) {
        EXPECT_TRUE(torch::equal(parameters[item.key()], item.value())) << item.key();
      }
    };
    const auto double_all = [](const nn::Module& changed) {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : changed.parameters()) parameter.mul_(2);
    };
    {
      auto full = model.summon_full_params();
      expect_same();
      double_all(*module);
      full.write_back();
    }
    double_all(*plain);
    EXPECT_EQ(model.full_bytes(), 0);
    {
      const auto full = model.summon_full_params();
      expect_same();
      double_all(*module);  // is lost, because write_back() is not called after it
    }
    {
      const auto full = model.summon_full_params();
      expect_same();
    }
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(model(data_of(0)), plain->forward(data_of(0))));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpPrecision, ComputesInTheDtypeOfThePrecision) {
  struct Watched : Tower {
    Watched() : Tower(2) { to(torch::kFloat); }
    Tensor forward(const Tensor& x) override {
      EXPECT_EQ(x.scalar_type(), torch::kBFloat16);
      EXPECT_EQ(units[0]->weight.scalar_type(), torch::kBFloat16);
      const Tensor output = Tower::forward(x);
      EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
      return output;
    }
  };
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Watched>();
    Options options = every_unit();
    options.precision = {
        .parameters = torch::kBFloat16, .reduce = torch::kFloat, .outputs = torch::kFloat};
    FullyShardedDataParallel model{module, group, options};
    torch::optim::SGD sgd(model.parameters(), 0.1);
    const Snapshot before = assembled_parameters(model, group);
    const Tensor output = model(rows_of(group, 0).to(torch::kFloat));
    EXPECT_EQ(output.scalar_type(), torch::kFloat);
    output.pow(2).mean().backward();
    for (const ParameterShard& shard : model.parameter_shards()) {
      EXPECT_EQ(shard.values.scalar_type(), torch::kFloat) << shard.name;
      EXPECT_EQ(shard.values.grad().scalar_type(), torch::kFloat) << shard.name;
    }
    {
      auto full = model.summon_full_params();
      const torch::NoGradGuard no_grad;
      module->head->bias.fill_(3);
      full.write_back();
    }
    const Snapshot after = assembled_parameters(model, group);
    for (size_t i = 0; i + 1 < before.size(); ++i) {
      EXPECT_TRUE(torch::equal(after[i], before[i])) << "what was not changed is not rounded";
    }
    EXPECT_EQ(after.back().item<float>(), 3);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpHybrid, ShardsAlongOneAxisAndReplicatesAlongTheOther) {
  const Snapshot expected = train_plain(std::make_shared<Tower>(3), PlainSteps{});
  for (const auto& [replicate, shard] : std::vector<std::pair<int, int>>{{2, 2}, {3, 1}, {1, 3}}) {
    const auto result = run_groups(replicate * shard, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {{"replicate", replicate}, {"shard", shard}});
      FullyShardedDataParallel model{std::make_shared<Tower>(3), mesh, every_unit()};
      torch::optim::SGD sgd(model.parameters(), 0.1);
      for (int i = 0; i < kTowerSteps; ++i) {
        sgd.zero_grad();
        model(rows_of(group, i)).pow(2).mean().backward();
        sgd.step();
      }
      Snapshot parameters;
      for (const ParameterShard& owned : model.parameter_shards()) {
        parameters.push_back(assembled(owned, owned.values, mesh.group("shard")));
      }
      expect_equal(parameters, expected);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FsdpSamples, RanksMayHaveNoRows) {
  const Snapshot expected = train_plain(std::make_shared<Tower>(2), PlainSteps{});
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{std::make_shared<Tower>(2), group, every_unit()};
    torch::optim::SGD sgd(model.parameters(), 0.1);
    const std::vector<int64_t> bounds = {0, 2, 2, kRows};
    for (int i = 0; i < kTowerSteps; ++i) {
      sgd.zero_grad();
      const int64_t begin = bounds[group.rank()];
      const Tensor rows = data_of(i).narrow(0, begin, bounds[group.rank() + 1] - begin);
      model(rows).pow(2).mean().backward();
      sgd.step();
    }
    expect_equal(assembled_parameters(model, group), expected);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpDerivatives, OfOutputsByInputs) {
  const auto penalty = [](auto& model, const Tensor& rows) {
    const Tensor x = rows.detach().clone().requires_grad_(true);
    const Tensor y = model.forward(x);
    const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, std::nullopt,
                                               /*create_graph=*/true)[0];
    (y.pow(2).mean() + slope.pow(2).sum(1).mean()).backward();
  };
  expect_trains_as_plain([] { return std::make_shared<Tower>(2); }, every_unit(), penalty, {2});
}

}  // namespace
}  // namespace cadre
