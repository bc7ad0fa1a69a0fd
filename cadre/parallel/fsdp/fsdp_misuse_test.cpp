// Tests which misuse of FullyShardedDataParallel is an error, the texts of the errors, and that
// training can continue afterwards.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kChainWidth = 4;
constexpr int kRanks = 2;

// A model of three units of equal size, which forward() calls in the order `order`. After each unit
// it calls `between`, with which tests run code inside of forward().
struct Chain : nn::Module {
  Chain() {
    for (int i = 0; i < 3; ++i) {
      units.push_back(
          register_module("unit" + std::to_string(i), LinearUnit(kChainWidth, kChainWidth)));
    }
    head = register_module("head", nn::Linear(kChainWidth, 1));
    to(torch::kDouble);
    set_values(*this);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (const size_t i : order) {
      h = torch::tanh(units[i]->forward(h));
      if (between) between(i);
    }
    return head(h);
  }
  std::vector<LinearUnit> units;
  nn::Linear head{nullptr};
  std::vector<size_t> order = {0, 1, 2};
  std::function<void(size_t unit)> between;
};

Tensor rows_of_chain(int rank) {
  return torch::linspace(-1, 1, 3 * kChainWidth, kDouble).view({3, kChainWidth}) * (1 + rank);
}

FullyShardedDataParallelOptions units_of_chain() {
  return {.wrap_policy = wrap_shard_units()};
}

struct TrainedRank {
  explicit TrainedRank(const ProcessGroup& of)
      : group(of), model(module, group, units_of_chain()), sgd(model.parameters(), 0.1) {}

  void step() {
    sgd.zero_grad();
    model(rows_of_chain(group.rank())).pow(2).mean().backward();
    sgd.step();
  }

  const ProcessGroup& group;
  std::shared_ptr<Chain> module = std::make_shared<Chain>();
  FullyShardedDataParallel<Chain> model;
  torch::optim::SGD sgd;
};

// Returns the parameters of a plain Chain after num_steps steps on the rows of both ranks.
Snapshot after_plain_steps(int num_steps) {
  Chain chain;
  torch::optim::SGD sgd(chain.parameters(), 0.1);
  for (int step = 0; step < num_steps; ++step) {
    sgd.zero_grad();
    torch::stack({chain.forward(rows_of_chain(0)), chain.forward(rows_of_chain(1))})
        .pow(2)
        .mean()
        .backward();
    sgd.step();
  }
  return copies_of(chain.parameters());
}

void expect_parameters(const TrainedRank& rank, const Snapshot& expected) {
  const Snapshot parameters = assembled_parameters(rank.model, rank.group);
  ASSERT_EQ(parameters.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(parameters[i], expected[i], 1e-12, 1e-14)) << i;
  }
}

// Trains one step on two ranks and then runs `body`.
void on_ranks(const std::function<void(TrainedRank&)>& body) {
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    TrainedRank rank(group);
    rank.step();
    body(rank);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

template <typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(FsdpMisuse, AParameterIsTouchedWhileItIsSharded) {
  on_ranks([](TrainedRank& rank) {
    const std::string message =
        message_of([&] { rank.module->units[1]->weight.const_data_ptr<double>(); });
    EXPECT_THAT(message, HasSubstr("of unit \"unit1\" of FullyShardedDataParallel are sharded"));
    EXPECT_THAT(message, HasSubstr("hold summon_full_params()"));
    EXPECT_THAT(message_of([&] { rank.module->head->bias.const_data_ptr<double>(); }),
                HasSubstr("of the root unit of FullyShardedDataParallel are sharded"));
    rank.step();
    expect_parameters(rank, after_plain_steps(2));
  });
}

TEST(FsdpMisuse, AnOptimizerOfTheModulesParameters) {
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    auto module = std::make_shared<Chain>();
    torch::optim::SGD before(module->parameters(), 0.1);
    FullyShardedDataParallel model{module, group, units_of_chain()};
    torch::optim::AdamW after(module->parameters(), 0.1);
    torch::optim::SGD right(model.parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      right.zero_grad();
      model(rows_of_chain(group.rank())).pow(2).mean().backward();
      for (torch::optim::Optimizer* wrong :
           std::initializer_list<torch::optim::Optimizer*>{&before, &after}) {
        EXPECT_THAT(message_of([&] { wrong->step(); }),
                    AnyOf(HasSubstr("Make the optimizer from the wrapper (model.parameters());"),
                          HasSubstr("Make an optimizer from the wrapper")));
      }
      EXPECT_THAT(message_of([&] { module->parameters()[0].grad().norm(); }),
                  HasSubstr("read gradients from the wrapper's parameter_shards()"));
      before.zero_grad();
      right.step();
    }
    const Snapshot expected = after_plain_steps(2);
    const Snapshot parameters = assembled_parameters(model, group);
    EXPECT_TRUE(torch::allclose(parameters[0], expected[0], 1e-12, 1e-14));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// module->zero_grad() does not clear the gradients of the shards at once; the next backward does
// it. With set_to_none=false this would not work, and is an error.
TEST(FsdpMisuse, ZeroGradOfTheModule) {
  on_ranks([](TrainedRank& rank) {
    rank.model->zero_grad();
    rank.model(rows_of_chain(rank.group.rank())).pow(2).mean().backward();
    rank.sgd.step();
    expect_parameters(rank, after_plain_steps(2));
    EXPECT_THAT(message_of([&] { rank.model->zero_grad(/*set_to_none=*/false); }),
                HasSubstr("let zero_grad() set gradients to none"));
    rank.model.zero_grad(/*set_to_none=*/false);
    rank.model(rows_of_chain(rank.group.rank())).pow(2).mean().backward();
    rank.sgd.step();
    expect_parameters(rank, after_plain_steps(3));
  });
}

TEST(FsdpMisuse, AUnitIsCalledOutsideOfTheForward) {
  on_ranks([](TrainedRank& rank) {
    EXPECT_THAT(error_of([&] { rank.module->units[2]->forward(rows_of_chain(0)); },
                         ErrorCode::kInvalidArgument),
                HasSubstr("unit \"unit2\" was called outside of the wrapper's forward()"));
    EXPECT_THAT(message_of([&] { rank.module->forward(rows_of_chain(0)); }),
                HasSubstr("unit \"unit0\" was called outside of the wrapper's forward()"))
        << "the module instead of the wrapper";
    rank.step();
    expect_parameters(rank, after_plain_steps(2));
  });
}

TEST(FsdpMisuse, AModelIsShardedTwice) {
  on_ranks([](TrainedRank& rank) {
    EXPECT_THAT(error_of([&] { fully_shard(rank.module->units[0]); }, ErrorCode::kInvalidArgument),
                HasSubstr("is a unit of a FullyShardedDataParallel already"));
    EXPECT_THAT(error_of(
                    [&] {
                      FullyShardedDataParallel{rank.module, rank.group, units_of_chain()};
                    },
                    ErrorCode::kInvalidArgument),
                HasSubstr("\"unit0\" is a unit of another FullyShardedDataParallel"));
    rank.step();
    expect_parameters(rank, after_plain_steps(2));
  });
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    const auto plain = std::make_shared<Chain>();  // has no units
    const FullyShardedDataParallel model{plain, group};
    EXPECT_THAT(
        error_of([&] { FullyShardedDataParallel(plain, group); }, ErrorCode::kInvalidArgument),
        HasSubstr("is wrapped already"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMisuse, TheModuleIsChangedAfterwards) {
  on_ranks([](TrainedRank& rank) {
    rank.module->to(torch::kFloat);
    EXPECT_THAT(message_of([&] { rank.step(); }), HasSubstr("and is Float"));
  });
  on_ranks([](TrainedRank& rank) {
    rank.module->register_parameter("late", torch::ones({2}, kDouble));
    EXPECT_THAT(error_of([&] { rank.step(); }, ErrorCode::kInvalidArgument),
                HasSubstr("\"late\" was added"));
  });
}

TEST(FsdpMisuse, TheWrapperIsGone) {
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Chain>();
    { const FullyShardedDataParallel model{module, group, units_of_chain()}; }
    EXPECT_THAT(error_of([&] { module->forward(rows_of_chain(0)); }, ErrorCode::kInvalidArgument),
                HasSubstr("whose FullyShardedDataParallel was destroyed"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMisuse, FullParametersInsideAForward) {
  on_ranks([](TrainedRank& rank) {
    rank.module->between = [&](size_t) { auto full = rank.model.summon_full_params(); };
    EXPECT_THAT(error_of([&] { rank.step(); }, ErrorCode::kInvalidArgument),
                HasSubstr("summon_full_params() was called inside forward()"));
    rank.module->between = nullptr;
    {
      const auto full = rank.model.summon_full_params();
      EXPECT_THAT(error_of([&] { rank.step(); }, ErrorCode::kInvalidArgument),
                  HasSubstr("forward() was called while summon_full_params()"));
      EXPECT_TRUE(rank.module->head->weight.sum().defined()) << "still full";
    }
    rank.step();
    expect_parameters(rank, after_plain_steps(2));
  });
}

TEST(FsdpMisuse, TwoBackwardsThroughOneForward) {
  on_ranks([](TrainedRank& rank) {
    rank.sgd.zero_grad();
    const Tensor loss = rank.model(rows_of_chain(rank.group.rank())).pow(2).mean();
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_THAT(error_of([&] { loss.backward(); }, ErrorCode::kInvalidArgument),
                HasSubstr("backward"));
    rank.sgd.step();
    rank.step();
    expect_parameters(rank, after_plain_steps(3));
  });
}

TEST(FsdpMisuse, AForwardThrowsOnAllRanks) {
  on_ranks([](TrainedRank& rank) {
    // The order of the units is known after this second step, and units are prefetched.
    rank.step();
    rank.module->between = [](size_t unit) {
      if (unit == 1) throw std::runtime_error("user");
    };
    EXPECT_EQ(message_of([&] { rank.step(); }), "user");
    EXPECT_EQ(rank.model.full_bytes(), 0);
    rank.module->between = nullptr;
    rank.step();
    rank.step();
    expect_parameters(rank, after_plain_steps(4));
  });
}

TEST(FsdpMisuse, AForwardThrowsOnOneRank) {
  on_ranks([](TrainedRank& rank) {
    rank.step();
    if (rank.group.rank() == 1) {
      rank.module->between = [](size_t) { throw std::runtime_error("user"); };
      EXPECT_EQ(message_of([&] { rank.step(); }), "user");
      rank.module->between = nullptr;
    }
    EXPECT_THAT(message_of([&] { rank.step(); }), HasSubstr("FullyShardedDataParallel"));
  });
}

TEST(FsdpMisuse, RanksUseOtherUnitsInTheFirstStep) {
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    TrainedRank rank(group);
    if (group.rank() == 1) rank.module->order = {0, 2, 1};
    EXPECT_THAT(error_of([&] { rank.step(); }, ErrorCode::kInvalidArgument),
                HasSubstr("the ranks use different units: rank 0 uses \"unit1\" in forward(), rank "
                          "1 uses \"unit2\" in forward()"));
    rank.module->order = {0, 1, 2};
    rank.step();
    expect_parameters(rank, after_plain_steps(1));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMisuse, RanksUseOtherUnitsInALaterStep) {
  on_ranks([](TrainedRank& rank) {
    rank.step();
    if (rank.group.rank() == 1) rank.module->order = {0, 2, 1};
    EXPECT_THAT(message_of([&] { rank.step(); }),
                ::testing::AllOf(HasSubstr("FullyShardedDataParallel"), HasSubstr("rank")));
  });
}

TEST(FsdpMisuse, RanksHaveOtherUnits) {
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Chain>();
    fully_shard(module->units[group.rank()]);
    EXPECT_THAT(
        error_of([&] { FullyShardedDataParallel(module, group); }, ErrorCode::kInvalidArgument),
        HasSubstr("the list of units is \"unit0\" on rank 0 and \"unit1\" on rank 1"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMisuse, RanksHaveOtherOptions) {
  using Choice = FullyShardedDataParallelOptions;
  for (const auto& [other, difference] : std::vector<std::pair<Choice, std::string>>{
           {{.precision = {.parameters = torch::kBFloat16}},
            "options of the root: precision.parameters is unset on rank 0 and BFloat16 on rank 1"},
           {{.precision = {.reduce = torch::kDouble}},
            "options of the root: precision.reduce is unset on rank 0 and Double on rank 1"},
           {{.num_prefetched = 0}, "options.num_prefetched is 1 on rank 0 and 0 on rank 1"},
           {{.reshard = Reshard::kAfterReduction},
            "options of \"unit0\": reshard is after_forward on rank 0 and after_reduction on rank "
            "1"},
           {{.form = ShardForm::kMapped},
            "options.form is kGathered on rank 0 and kMapped on rank 1"},
           {{.broadcast_buffers = false},
            "options.broadcast_buffers is true on rank 0 and false on rank 1"}}) {
    const auto result =
        run_groups(2, [&, &other = other, &difference = difference](const ProcessGroup& group) {
          const auto module = std::make_shared<Chain>();
          fully_shard(module->units[0]);
          EXPECT_THAT(error_of(
                          [&] {
                            FullyShardedDataParallel(module, group,
                                                     group.rank() == 1 ? other : Choice());
                          },
                          ErrorCode::kInvalidArgument),
                      HasSubstr(difference));
        });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// fully_shard() after the construction of the wrapper would have no effect, because the module's
// parameters are already sharded, in its own unit or in that of the root. So it must throw.
TEST(FsdpMisuse, AModuleIsDeclaredAfterTheWrapperIsMade) {
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    const auto module = std::make_shared<Chain>();
    fully_shard(module->units[0]);
    const FullyShardedDataParallel model(module, group);
    EXPECT_THAT(error_of([&] { fully_shard(module->units[0]); }, ErrorCode::kInvalidArgument),
                HasSubstr("is a unit of a FullyShardedDataParallel already"));
    EXPECT_THAT(error_of([&] { fully_shard(module->units[1]); }, ErrorCode::kInvalidArgument),
                HasSubstr("is in a model that a FullyShardedDataParallel has sharded already"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMisuse, AllRanksMayChangeTheOrder) {
  on_ranks([](TrainedRank& rank) {
    for (const std::vector<size_t>& order :
         std::vector<std::vector<size_t>>{{2, 1, 0}, {0, 1, 2}, {1, 1, 0}, {0, 1, 2}}) {
      rank.module->order = order;
      rank.step();
    }
    Chain chain;
    torch::optim::SGD sgd(chain.parameters(), 0.1);
    for (const std::vector<size_t>& order :
         std::vector<std::vector<size_t>>{{0, 1, 2}, {2, 1, 0}, {0, 1, 2}, {1, 1, 0}, {0, 1, 2}}) {
      chain.order = order;
      sgd.zero_grad();
      torch::stack({chain.forward(rows_of_chain(0)), chain.forward(rows_of_chain(1))})
          .pow(2)
          .mean()
          .backward();
      sgd.step();
    }
    expect_parameters(rank, copies_of(chain.parameters()));
  });
}

TEST(FsdpMisuse, AModelWithoutUnitsIsLogged) {
  for (const bool has_units : {false, true}) {
    const auto log = std::make_shared<LogLines>();
    const auto result =
        run_groups(kRanks,
                   [&](const ProcessGroup& group, std::string&) {
                     const FullyShardedDataParallel model{
                         std::make_shared<Chain>(), group,
                         has_units ? units_of_chain() : FullyShardedDataParallelOptions()};
                   },
                   {.log = log});
    EXPECT_TRUE(result.ok()) << result.failures();
    if (has_units) {
      EXPECT_THAT(log->get(), ::testing::IsEmpty());
    } else {
      EXPECT_THAT(log->get(), ::testing::ElementsAre(::testing::StartsWith(
                                  "fsdp the model has no unit beside the root parameters=8 ")));
    }
  }
}

TEST(FsdpMisuse, WhatTheConstructorRefuses) {
  const auto result = run_groups(1, [&](const ProcessGroup& group) {
    const auto refusal = [&](const auto& module, const auto& ranks,
                             const FullyShardedDataParallelOptions& options = {}) {
      return error_of([&] { FullyShardedDataParallel(module, ranks, options); },
                      ErrorCode::kInvalidArgument);
    };
    EXPECT_THAT(refusal(std::shared_ptr<Chain>(), group), HasSubstr("the module is null"));
    EXPECT_THAT(refusal(std::make_shared<Chain>(), group, {.num_prefetched = 2}),
                HasSubstr("options.num_prefetched is 2"));
    const std::vector<std::pair<FullyShardedDataParallelOptions, std::string>> unusable = {
        {{.reshard_group_size = 1}, "options.reshard_group_size is 1, but no unit uses"},
        {{.precision = {.parameters = torch::kInt}}, "options.precision.parameters is Int"},
        {{.precision = {.reduce = torch::kLong}}, "options.precision.reduce is Long"},
        {{.precision = {.outputs = torch::kBool}}, "options.precision.outputs is Bool"},
        {{.offload = FileOffload{.folder = "/", .num_states = -1}},
         "options.offload.num_states is -1"}};
    for (const auto& [options, what] : unusable) {
      EXPECT_THAT(refusal(std::make_shared<Chain>(), group, options), HasSubstr(what));
    }
    const auto unit_options = [&](const FullyShardOptions& options) {
      const auto chain = std::make_shared<Chain>();
      fully_shard(chain->units[0], options);
      return refusal(chain, group);
    };
    EXPECT_THAT(unit_options({.reshard_group_size = 1}),
                HasSubstr("the reshard_group_size of unit \"unit0\" is 1, and its reshard is not"));
    EXPECT_THAT(unit_options({.precision = ShardPrecision{.parameters = torch::kInt}}),
                HasSubstr("the precision.parameters of unit \"unit0\" is Int"));
    EXPECT_THAT(
        refusal(std::make_shared<Chain>(), DeviceMesh(group, {{"a", 1}, {"b", 1}, {"c", 1}})),
        HasSubstr("has 3 axes"));
    const auto policy_options = [&](const ShardPrecision& precision) {
      const WrapPolicy policy = wrap_by_type<torch::nn::LinearImpl>({.precision = precision});
      return refusal(std::make_shared<Chain>(), group, {.wrap_policy = policy});
    };
    EXPECT_THAT(policy_options({.parameters = torch::kBFloat16}),
                HasSubstr("another precision.parameters than the wrapper has, and only a "));
    EXPECT_THAT(policy_options({.outputs = torch::kFloat}),
                HasSubstr("another precision.outputs than the wrapper has, and only a "));
    const auto chain = std::make_shared<Chain>();
    fully_shard(chain->units[0], {.precision = ShardPrecision{.reduce = torch::kFloat}});
    EXPECT_THAT(refusal(chain, group), HasSubstr("another precision.reduce than the wrapper"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
