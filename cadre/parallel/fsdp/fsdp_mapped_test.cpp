// Tests that FullyShardedDataParallel with mapped shards computes the same bits as with gathered
// shards, for several models, options and orders of calls, and with ranks that pause at random.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::SGD;
using Options = FullyShardedDataParallelOptions;

// The results of a training on one rank, which the tests compare between the two forms of shards.
struct Observed {
  std::vector<Tensor> losses;
  std::vector<Tensor> gradients;
  std::vector<Tensor> parameters;
};

void expect_same_bits(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                      const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << what << " " << i;
    if (!expected[i].defined()) continue;
    ASSERT_TRUE(torch::equal(actual[i], expected[i])) << what << " " << i;
  }
}

struct Setting {
  std::function<void()> pause = [] {};  // called between the calls of a step, to delay a rank
  int num_steps = 4;
};

// Trains, and returns losses, whole gradients and whole parameters. Whole tensors can be compared
// even if the shards of the two forms have different bounds.
template <typename M, typename Step>
Observed observe(FullyShardedDataParallel<M>& model, const std::shared_ptr<M>& module,
                 torch::optim::Optimizer& optimizer, const ProcessGroup& shard_group, Step step,
                 const Setting& setting) {
  Observed seen;
  for (int i = 0; i < setting.num_steps; ++i) {
    optimizer.zero_grad();
    setting.pause();
    seen.losses.push_back(step(model, i));
    setting.pause();
    for (const ParameterShard& shard : model.parameter_shards()) {
      seen.gradients.push_back(assembled(shard, shard.values.grad(), shard_group));
    }
    {
      const torch::NoGradGuard no_grad;  // a forward between backward and step
      seen.losses.push_back(model.forward(data_of(90 + i)).detach().clone());
    }
    setting.pause();
    optimizer.step();
    setting.pause();
  }
  const auto full = model.summon_full_params();
  for (const NamedTensor& parameter : distinct_parameters(*module)) {
    seen.parameters.push_back(parameter.tensor.detach().clone());
  }
  return seen;
}

// Step i of a training without the optimizer: runs forward and backward, and returns the loss.
struct OneBackward {
  const ProcessGroup* group;
  template <typename Model>
  Tensor operator()(Model& model, int i) const {
    const Tensor loss = model.forward(rows_of(*group, i)).pow(2).mean();
    loss.backward();
    return loss.detach().clone();
  }
};

template <typename Make, typename Ranks, typename Step>
void compare_forms_on(const ProcessGroup& shard_group, const Ranks& ranks, Make make,
                      Options options, Step step, const Setting& setting = {}) {
  const torch::optim::AdamWOptions adamw = torch::optim::AdamWOptions(0.05).weight_decay(0.01);
  const auto reference = make();
  FullyShardedDataParallel gathered{reference, ranks, options};
  ASSERT_EQ(gathered.form(), ShardForm::kGathered);
  AdamW plain{gathered.parameters(), adamw};
  const Observed expected = observe(gathered, reference, plain, shard_group, step, Setting{});
  const auto module = make();
  options.form = ShardForm::kMapped;
  FullyShardedDataParallel mapped{module, ranks, options};
  ASSERT_EQ(mapped.form(), ShardForm::kMapped);
  ShardedOptimizer<AdamW> sharded{mapped, adamw};
  const Observed actual = observe(mapped, module, sharded, shard_group, step, setting);
  expect_same_bits(actual.losses, expected.losses, "loss");
  expect_same_bits(actual.gradients, expected.gradients, "gradient");
  expect_same_bits(actual.parameters, expected.parameters, "parameter");
  ASSERT_FALSE(torch::equal(expected.losses[0], expected.losses[2])) << "it trains";
  EXPECT_EQ(mapped.full_bytes(), 0);
}

template <typename Make>
void compare_forms_of(Make make, const Options& options,
                      const std::vector<int>& world_sizes = {1, 2, 3}) {
  for (const int world_size : world_sizes) {
    SCOPED_TRACE(std::to_string(world_size) + " ranks");
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      compare_forms_on(group, group, make, options, OneBackward{&group});
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

template <typename M>
auto made() {
  return [] { return std::make_shared<M>(); };
}

Options modes(Reshard reshard, Reshard root, int num_prefetched) {
  Options options = every_unit();
  options.reshard = reshard;
  options.reshard_root = root;
  options.num_prefetched = num_prefetched;
  return options;
}

TEST(FsdpMapped, TrainsWithTheBitsOfTheGatheringFormInEveryMode) {
  compare_forms_of(made<Tower>(), every_unit(), {1, 2, 3, 4, 8});
  compare_forms_of(made<Tower>(), modes(Reshard::kAfterForward, Reshard::kAfterForward, 0));
  compare_forms_of(made<Tower>(), modes(Reshard::kAfterBackward, Reshard::kAfterBackward, 1));
  compare_forms_of(made<Tower>(), modes(Reshard::kAfterReduction, Reshard::kAfterReduction, 1));
  // The root is the only unit, because fully_shard() was not called.
  compare_forms_of(made<Tower>(), {}, {3});
}

TEST(FsdpMapped, TrainsFrozenUnusedTiedRecomputedAndMixedParameters) {
  compare_forms_of(made<Special>(), every_unit());
  compare_forms_of(made<Special>(), modes(Reshard::kAfterReduction, Reshard::kAfterReduction, 1));
  compare_forms_of(made<Recomputed>(), every_unit());
  compare_forms_of(made<MixedTower>(), every_unit());
}

TEST(FsdpMapped, TrainsInAComputeDtypeOfItsOwn) {
  Options options = every_unit();
  options.precision = {.parameters = torch::kFloat, .reduce = torch::kDouble};
  options.precision.outputs = kDouble;
  compare_forms_of(made<Tower>(), options);
  options.precision.parameters = torch::kBFloat16;
  compare_forms_of(made<Tower>(), options);
}

TEST(FsdpMapped, AccumulatesWithAndWithoutReduction) {
  for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kAfterReduction}) {
    Options options = modes(reshard, reshard, 1);
    options.weighting = GradientWeighting::kEqual;
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const auto without = [&](auto& model, int i) {
        Accumulation<false>{}(model, rows_of(group, i));
        return torch::zeros({1}) + i;
      };
      compare_forms_on(group, group, made<Tower>(), options, without);
      const auto with = [&](auto& model, int i) {
        Accumulation<true>{}(model, rows_of(group, i));
        return torch::zeros({1}) + i;
      };
      compare_forms_on(group, group, made<Tower>(), options, with);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FsdpMapped, TrainsOnUnequalBatchesAndThroughDerivatives) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    const std::vector<int64_t> bounds = {0, 2, 2, kRows};
    const int64_t begin = bounds[group.rank()];
    const int64_t size = bounds[group.rank() + 1] - begin;
    const auto unequal = [&](auto& model, int i) {
      const Tensor loss = model.forward(data_of(i).narrow(0, begin, size)).pow(2).mean();
      loss.backward();
      return torch::zeros({1}) + i;
    };
    compare_forms_on(group, group, made<Tower>(), every_unit(), unequal);
    const auto penalty = [&](auto& model, int i) {
      const Tensor x = rows_of(group, i).clone().requires_grad_(true);
      const Tensor y = model.forward(x);
      const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, std::nullopt,
                                                 /*create_graph=*/true)[0];
      const Tensor loss = y.pow(2).mean() + slope.pow(2).sum(1).mean();
      loss.backward();
      return loss.detach().clone();
    };
    compare_forms_on(group, group, made<Tower>(), every_unit(), penalty);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMapped, TrainsOnTwoAxes) {
  for (const auto& [replicate, shard] : std::vector<std::pair<int, int>>{{2, 2}, {3, 1}, {1, 3}}) {
    const auto result = run_groups(replicate * shard, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {{"replicate", replicate}, {"shard", shard}});
      compare_forms_on(mesh.group("shard"), mesh, made<Tower>(), every_unit(), OneBackward{&group});
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Ranks pause at random points, also inside of forwards and backwards.
TEST(FsdpMapped, TrainsOnSkewedRanks) {
  struct Late : Tower {
    Tensor forward(const Tensor& x) override {
      Tensor h = x;
      for (auto& unit : units) {
        if (pause) pause();
        h = h + torch::tanh(unit->forward(h));
        if (pause && h.requires_grad()) {
          h.register_hook([nap = pause](const Tensor& gradient) {
            nap();
            return gradient;
          });
        }
      }
      return head(h);
    }
    std::function<void()> pause;
  };
  const uint64_t seed = test_seeds(1)[0];
  for (const int world_size : {2, 3, 4}) {
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      std::mt19937_64 random(seed + static_cast<uint64_t>(group.rank()));
      int num_made = 0;
      os::System& system = group.communicator().system();
      const auto nap = [&] {
        if (random() % 4 != 0) return;
        const Deadline end = system.deadline_in(std::chrono::microseconds(random() % 500));
        const auto waiter = system.make_waiter();
        while (!end.has_passed(system.now())) waiter->park(end);
      };
      const auto make = [&] {
        auto late = std::make_shared<Late>();
        if (++num_made == 2) late->pause = nap;
        return late;
      };
      compare_forms_on(group, group, make, every_unit(), OneBackward{&group},
                       {.pause = nap, .num_steps = 4});
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks, seed " << seed << ": " << result.failures();
  }
}

TEST(FsdpMapped, ANumberOfUnitsOnlyEvaluates) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    Options options = every_unit();
    options.form = ShardForm::kMapped;
    FullyShardedDataParallel model{std::make_shared<Tower>(), group, options};
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(torch::equal(model(data_of(i)), Tower().forward(data_of(i))));
    }
    EXPECT_EQ(model.peak_full_bytes(), 0);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The optimizer has two parameter groups, and one of them contains ignored parameters, which are
// whole on every rank.
TEST(FsdpMapped, StepsGroupsAndIgnoredParameters) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    std::vector<Snapshot> trained;
    for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
      const auto module = std::make_shared<Tower>(2);
      Options options = every_unit();
      options.form = form;
      options.ignored = {"unit1"};
      FullyShardedDataParallel model{module, group, options};
      std::vector<Tensor> decayed, others;
      for (const ParameterShard& shard : model.parameter_shards()) {
        (shard.sizes.size() >= 2 ? decayed : others).push_back(shard.values);
      }
      const auto ignored = module->units[1]->parameters();
      others.insert(others.end(), ignored.begin(), ignored.end());
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(decayed, std::make_unique<torch::optim::AdamWOptions>(
                                       torch::optim::AdamWOptions(0.05).weight_decay(0.5)));
      groups.emplace_back(others);
      ShardedOptimizer<AdamW> optimizer{model, groups, torch::optim::AdamWOptions(0.01)};
      ASSERT_EQ(optimizer.param_groups().size(), 2);
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        model(rows_of(group, i)).pow(2).mean().backward();
        optimizer.step();
      }
      trained.push_back(assembled_parameters(model, group));
      for (const Tensor& parameter : ignored) trained.back().push_back(parameter.detach().clone());
    }
    expect_same_bits(trained[1], trained[0], "parameter");
    EXPECT_FALSE(torch::equal(trained[0].back(), Tower(2).units[1]->bias)) << "it was stepped";
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The test also runs on one rank, where the parameters may share the memory of the shard.
TEST(FsdpSummon, WritesOnlyWhatIsWrittenBackInBothForms) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    for (const int world_size : {1, 3}) {
      SCOPED_TRACE(std::to_string(world_size) + " ranks, form " +
                   std::to_string(static_cast<int>(form)));
      const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
        const auto module = std::make_shared<Tower>(2);
        Options options = every_unit();
        options.form = form;
        FullyShardedDataParallel model{module, group, options};
        const Tower plain(2);
        const torch::NoGradGuard no_grad;
        for (const bool is_kept : {false, true}) {
          auto full = model.summon_full_params();
          for (const Tensor& parameter : module->parameters()) parameter.mul_(2);
          if (is_kept) full.write_back();
          const Tensor& weight = module->units[0]->weight;
          EXPECT_TRUE(torch::equal(weight, plain.units[0]->weight * 2)) << "readable";
        }
        EXPECT_EQ(model.full_bytes(), 0);
        for (const Tensor& parameter : plain.parameters()) parameter.mul_(2);
        const auto full = model.summon_full_params();
        expect_same_bits(copies_of(module->parameters()), copies_of(plain.parameters()),
                         "written once, parameter");
      });
      EXPECT_TRUE(result.ok()) << result.failures();
    }
  }
}

// The compute dtype has fewer digits than the shards. Elements that the program has not changed
// must keep their exact values in the shards.
TEST(FsdpSummon, DoesNotRoundWhatIsWrittenBackUnchanged) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Tower>(2);
    Options options = every_unit();
    options.form = ShardForm::kMapped;
    options.precision = {.parameters = torch::kBFloat16, .outputs = kDouble};
    FullyShardedDataParallel model{module, group, options};
    ASSERT_EQ(model.form(), ShardForm::kMapped);
    const Snapshot before = assembled_parameters(model, group);
    {
      auto full = model.summon_full_params();
      const torch::NoGradGuard no_grad;
      module->head->bias.fill_(3);
      full.write_back();
    }
    Snapshot after = assembled_parameters(model, group);
    EXPECT_EQ(after.back().item<double>(), 3);
    after.back() = before.back();
    expect_same_bits(after, before, "parameter");
    const torch::NoGradGuard no_grad;
    EXPECT_GT(model(data_of(0)).mean().item<double>(), 2) << "the forward reads what was written";
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpUpdate, WritesShardsOfBothForms) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      Options options = modes(Reshard::kAfterReduction, Reshard::kAfterReduction, 1);
      options.form = form;
      FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
      const torch::NoGradGuard no_grad;
      model(data_of(9));
      ShardUpdate update{model};
      for (const ParameterShard& shard : model.parameter_shards()) shard.values.mul_(0.5);
      EXPECT_THAT(error_of([&] { model(data_of(9)); }, ErrorCode::kInvalidArgument),
                  HasSubstr("are used during an update of the shards; end the update first"));
      update.finish();
      Tower plain(2);
      for (const Tensor& parameter : plain.parameters()) parameter.mul_(0.5);
      EXPECT_TRUE(torch::equal(model(data_of(9)), plain.forward(data_of(9))));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Units stay full between two backwards under no_sync(). If the program changes the shards in a
// ShardUpdate in between, the next forward must nevertheless use the new values.
TEST(FsdpUpdate, IsSeenByUnitsThatAreFull) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      Options options = modes(Reshard::kAfterReduction, Reshard::kAfterReduction, 1);
      options.form = form;
      options.weighting = GradientWeighting::kEqual;
      FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
      {
        const NoSync no_sync = model.no_sync();
        model(data_of(0)).mean().backward();
      }
      const torch::NoGradGuard no_grad;
      ShardUpdate update{model};
      for (const Tensor& values : model.parameters()) values.mul_(0.5);
      update.finish();
      Tower plain(2);
      for (const Tensor& parameter : plain.parameters()) parameter.mul_(0.5);
      EXPECT_TRUE(torch::equal(model(data_of(9)), plain.forward(data_of(9))));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FsdpMapped, IsGatheredWhereRanksShareNoMemory) {
  const auto result =
      run_groups(2,
                 [&](const ProcessGroup& group) {
                   std::vector<Snapshot> trained;
                   for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
                     Options options = every_unit();
                     options.form = form;
                     FullyShardedDataParallel model{std::make_shared<Tower>(2), group, options};
                     EXPECT_EQ(model.form(), ShardForm::kGathered);
                     ShardedOptimizer<SGD> optimizer{model, 0.1};
                     for (int i = 0; i < 3; ++i) {
                       optimizer.zero_grad();
                       model(rows_of(group, i)).pow(2).mean().backward();
                       optimizer.step();
                     }
                     trained.push_back(assembled_parameters(model, group));
                   }
                   expect_same_bits(trained[1], trained[0], "parameter");
                 },
                 {.transport = TransportChoice::kTcp});
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
