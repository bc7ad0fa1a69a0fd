// Tests that training on 1 to 8 ranks, as threads, under every wrapper equals training in one
// process with libtorch's optimizer on the whole batch: the losses and gradients of 20 steps and
// the final parameters are within the bounds of wrap_bounds.h. On one host all wrappers must have
// equal bits. sharded_plants_test.cpp shows that the comparison finds defects.
//
// CTest runs a small part of the cases, chosen by the seed CADRE_CASES_SEED; `make equality` runs
// all and prints, for each dtype and optimizer, the largest ratio of a deviation to its bound.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/random.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/sharded_training.h"

namespace cadre {
namespace {

using testing::bits_of;
using testing::Case;
using testing::Comparison;
using testing::Division;
using testing::make_batches;
using testing::make_unit_model;
using testing::Model;
using testing::ShardedCase;
using testing::Snapshot;
using testing::Strategy;
using testing::Training;

// Returns the number of seeds for weights and data that each case runs with: CADRE_EQUALITY_SEEDS,
// or 1.
uint64_t num_seeds() {
  const char* text = std::getenv("CADRE_EQUALITY_SEEDS");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

// The largest deviations of all runs in this process, as ratios to their bounds.
struct Used {
  int64_t num_runs = 0;
  Comparison worst;
};

class ShardedEquality : public ::testing::TestWithParam<std::pair<ShardedCase, int>> {
 protected:
  static std::map<std::string, Used>& used() {
    static std::map<std::string, Used> used;
    return used;
  }
  static void TearDownTestSuite() {
    for (const auto& [name, use] : used()) {
      std::cout << name << ": " << use.num_runs << " trainings; worst shares of the bounds: losses "
                << use.worst.losses << ", gradients of the first step " << use.worst.first_gradients
                << ", of any step " << use.worst.gradients << ", parameters "
                << use.worst.parameters << "; parameters differ by " << use.worst.relative
                << " of the largest\n";
    }
  }
  static void compare_strategies(uint64_t seed);
  static void note(const ShardedCase& test_case, const Comparison& comparison) {
    const Case& training = test_case.training;
    const char* dtype = testing::has_bfloat16(training)    ? "bfloat16"
                        : training.dtype == torch::kDouble ? "float64"
                                                           : "float32";
    Used& use = used()[std::string(dtype) + " " + training.optimizer +
                       (test_case.is_fused ? " fused" : " libtorch")];
    ++use.num_runs;
    use.worst = worse_of(use.worst, comparison);
  }
};

// Returns one training for each strategy.
std::vector<Training> train_all(const ShardedCase& test_case,
                                const std::vector<torch::Tensor>& batches,
                                const std::vector<Strategy>& strategies, int world_size,
                                uint64_t seed) {
  std::vector<std::vector<std::shared_ptr<Model>>> models;
  for (int rank = 0; rank < world_size; ++rank) {
    models.emplace_back();
    for (size_t i = 0; i < strategies.size(); ++i) {
      models.back().push_back(
          make_unit_model(test_case.training, seed + static_cast<uint64_t>(rank)));
    }
  }
  std::vector<Training> trained(strategies.size());
  const auto result = testing::run_groups(world_size, [&](const ProcessGroup& group) {
    for (size_t i = 0; i < strategies.size(); ++i) {
      Training training = [&] {
        try {
          return train_under(strategies[i], test_case, batches, group, models[group.rank()][i]);
        } catch (const Error& error) {
          throw Error(error.code(), strategies[i].name + ": " + error.message());
        }
      }();
      // All ranks must have the same parameters.
      const std::string bits = bits_of(training.parameters);
      const auto digest = static_cast<int64_t>(std::hash<std::string>()(bits));
      const auto lowest = torch::tensor({digest, -digest});
      group.all_reduce(lowest, {.op = ReduceOp::kMin});
      testing::require(lowest[0].item<int64_t>() == -lowest[1].item<int64_t>(),
                       strategies[i].name + ": the ranks have different parameters");
      if (group.rank() == group.world_size() - 1) trained[i] = std::move(training);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return trained;
}

// Returns a text with the first tensor whose bits differ; an empty text if all are equal.
std::string difference_of(const Snapshot& a, const Snapshot& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (bits_of({a[i]}) == bits_of({b[i]})) continue;
    const std::string tensor = "tensor " + std::to_string(i);
    if (!a[i].defined() || !b[i].defined()) return tensor + " is there on one side only";
    return tensor + " differs by " +
           std::to_string((a[i] - b[i]).abs().max().to(torch::kDouble).item<double>());
  }
  return "";
}

void expect_within_bounds(const Case& training, const Comparison& comparison) {
  EXPECT_LE(comparison.losses, 1);
  EXPECT_LE(comparison.first_gradients, 1);
  if (testing::uses_adamw_bound(training) && !testing::has_bfloat16(training)) {
    // The bounds of the parameters are derived from the bound of the gradients.
    EXPECT_LE(comparison.gradients, 1);
  }
  EXPECT_LE(comparison.parameters, 1);
}

// Trains in one process and under every strategy, and compares the results.
void ShardedEquality::compare_strategies(uint64_t seed) {
  const auto& [test_case, world_size] = GetParam();
  const auto batches = make_batches(test_case.training, seed);
  const Training alone = testing::train_alone(test_case.training, batches, seed);
  const auto strategies = testing::all_strategies(world_size);
  const auto trained = train_all(test_case, batches, strategies, world_size, seed);
  std::map<std::string, size_t> first_of_class;
  for (size_t i = 0; i < strategies.size(); ++i) {
    SCOPED_TRACE(strategies[i].name + ", seed " + std::to_string(seed));
    ASSERT_EQ(trained[i].gradients.size(), alone.gradients.size());
    const Comparison comparison = compare_with_losses(test_case.training, trained[i], alone);
    note(test_case, comparison);
    expect_within_bounds(test_case.training, comparison);
    const std::string bits = bits_class(strategies[i], test_case);
    if (bits.empty()) continue;
    const size_t first = first_of_class.emplace(bits, i).first->second;
    SCOPED_TRACE("bits of " + strategies[first].name);
    EXPECT_EQ(trained[i].losses, trained[first].losses);
    std::string different;
    for (size_t step = 0; step < alone.gradients.size() && different.empty(); ++step) {
      different = difference_of(trained[i].gradients[step], trained[first].gradients[step]);
      if (!different.empty()) different += " in step " + std::to_string(step);
    }
    EXPECT_EQ(different, "");
    EXPECT_EQ(difference_of(trained[i].parameters, trained[first].parameters), "");
  }
}

TEST_P(ShardedEquality, OfEveryStrategyWithOneProcess) {
  for (uint64_t seed = 0; seed < num_seeds(); ++seed) compare_strategies(1 + 1000 * seed);
}

using RareUnit = torch::nn::ModuleHolder<ShardUnit<testing::RareLinearImpl>>;

// A module whose second unit uses its parameters only for certain rows, which only rank 0 has.
struct PartlyUsed : torch::nn::Module {
  PartlyUsed() {
    first = register_module("first", testing::LinearUnit(4, 4));
    second = register_module("second", RareUnit(4, 4));
    head = register_module("head", testing::LinearUnit(4, 1));
    testing::set_values(*this);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return head(second(torch::tanh(first(x)), x.select(1, 0)));
  }
  testing::LinearUnit first{nullptr}, head{nullptr};
  RareUnit second{nullptr};
};

// The ranks would reduce the gradients of the unit at different positions in the order of units.
// All ranks must throw, because a unit must never get the values of another unit.
TEST(ShardedEqualityLimit, AUnitThatOnlySomeRanksUseIsAnErrorOnAllRanks) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel model{
        std::make_shared<PartlyUsed>(), group,
        FullyShardedDataParallelOptions{.num_prefetched = 0, .wrap_policy = wrap_shard_units()}};
    const torch::Tensor x = torch::full({3, 4}, group.rank() == 0 ? 2.0 : 1.0);
    const std::string failure = testing::failure_of([&] { model(x).pow(2).mean().backward(); });
    testing::require(failure.starts_with("kInvalidArgument: ") &&
                         failure.find("the ranks are not at the same place of the same step") !=
                             std::string::npos,
                     "expected an error about the order of units, got: " + failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

std::vector<ShardedCase> sharded_cases() {
  std::vector<ShardedCase> cases;
  const auto add_divisions = [&](Case training, bool is_fused) {
    for (const int64_t batch : {48, 25}) {
      for (const Division division :
           {Division::kWhole, Division::kEmpty, Division::kNoSync, Division::kSynced}) {
        training.batch = batch;
        cases.push_back({training, division, is_fused});
      }
    }
  };
  for (const char* optimizer : {"sgd", "adamw"}) {
    for (const char* model : {"mlp", "cnn", "gpt", "mixed"}) {
      for (const auto dtype : {torch::kDouble, torch::kFloat}) {
        add_divisions({model, optimizer, 48, dtype}, /*is_fused=*/true);
        for (const Division division : {Division::kWhole, Division::kNoSync}) {
          cases.push_back({{model, optimizer, 25, dtype, /*is_checkpointed=*/true}, division});
        }
        cases.push_back({{model, optimizer, 25, dtype}, Division::kWhole, /*is_fused=*/false});
      }
    }
  }
  add_divisions({"mixed_bfloat16", "adamw", 48, torch::kFloat}, /*is_fused=*/true);
  cases.push_back({{"mixed_bfloat16", "adamw", 25, torch::kFloat}, Division::kWhole, false});
  cases.push_back({{"mixed_bfloat16", "sgd", 25, torch::kFloat}, Division::kWhole, false});
  return cases;
}

// The cases are shuffled, so that any part of the list has some cases of every kind.
std::vector<std::pair<ShardedCase, int>> cases_and_ranks() {
  std::vector<std::pair<ShardedCase, int>> cases;
  for (const ShardedCase& test_case : sharded_cases()) {
    for (const int world_size : {1, 2, 3, 4, 8}) cases.emplace_back(test_case, world_size);
  }
  Random random(7);
  for (size_t i = cases.size() - 1; i > 0; --i) std::swap(cases[i], cases[random.below(i + 1)]);
  return cases;
}

std::string name_of_sharded_case(
    const ::testing::TestParamInfo<std::pair<ShardedCase, int>>& parameter) {
  return ::testing::PrintToString(parameter.param.first) + "_" +
         std::to_string(parameter.param.second) + "_ranks";
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ShardedEquality,
    ::testing::ValuesIn(testing::share_of(testing::share_of(testing::share_of(cases_and_ranks())))),
    name_of_sharded_case);

}  // namespace
}  // namespace cadre
