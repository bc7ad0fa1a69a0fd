// Tests that correct programs are within their bounds under every strategy, and that a defect in a
// program or a group is reported with the tensor, step and rank of the deviation.
#include "cadre/train/verify/verify_strategies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/verify_programs.h"
#include "cadre/testing/torch/wrap_training.h"

namespace cadre {
namespace {

using ::testing::AnyOf;
using testing::Case;
using ::testing::ElementsAre;
using testing::FakeGroup;
using testing::GroupCall;
using ::testing::HasSubstr;
using testing::make_batches;
using testing::make_unit_model;
using testing::report_of;
using testing::rows_of_step;
using testing::Tensor;
using testing::TwoHeads;
using testing::verify_on_ranks;

const torch::optim::SGDOptions kSgd = torch::optim::SGDOptions(0.05).momentum(0.9);
const torch::optim::AdamWOptions kAdamw(0.003);

// The mean over the rows, which is the loss of every program of these tests.
constexpr auto kLossOfHeads = [](auto& model, const Tensor& rows) {
  return (model(rows) - rows.narrow(1, 0, 3)).pow(2).mean();
};

class VerifyModels : public ::testing::TestWithParam<std::pair<Case, int>> {};

TEST_P(VerifyModels, EveryStrategyIsWithinTheBounds) {
  const auto& [test_case, world_size] = GetParam();
  constexpr uint64_t kSeed = 3;
  // The batches are made before the ranks start: the ranks are threads, which share libtorch's
  // random generator.
  const auto batches = make_batches(test_case, kSeed);
  const auto prototype = make_unit_model(test_case, kSeed)->parameters();
  const VerifyReport report = verify_on_ranks(world_size, [&](const ProcessGroup& group) {
    const auto make_module = [&] {
      const auto model = make_unit_model(test_case, kSeed);
      const torch::NoGradGuard no_grad;
      const auto parameters = model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(prototype[i]);
      return model;
    };
    const auto make_batch = [&](int64_t step) { return batches[static_cast<size_t>(step)]; };
    const auto loss = [](auto& model, const Tensor& rows) {
      return model.module()->loss(model(rows), rows);
    };
    const VerifyOptions options{.num_steps = 3};
    if (test_case.optimizer == "sgd") {
      return verify_strategies(group, make_module, make_batch, loss, kSgd, options);
    }
    return verify_strategies(group, make_module, make_batch, loss, kAdamw, options);
  });
  EXPECT_TRUE(report.is_within()) << report.to_text();
  // The report has a line for each of these cases: ddp, zero1 and zero2; for fsdp, and for hsdp on
  // each mesh, three modes of resharding and mapped shards; on 4 ranks also fsdp with resharding
  // onto groups. Each of them runs with one part and with two.
  EXPECT_EQ(report.strategies.size(), world_size == 4 ? 24U : 14U);
  EXPECT_EQ(report.num_steps, 3);
  EXPECT_EQ(report.world_size, world_size);
}

std::vector<std::pair<Case, int>> verified_cases() {
  std::vector<std::pair<Case, int>> cases;
  for (const char* model : {"mlp", "cnn", "gpt"}) {
    for (const int world_size : {1, 2, 4}) {
      cases.push_back({{model, "sgd", 25, torch::kDouble}, world_size});
      cases.push_back({{model, "adamw", 24, torch::kFloat}, world_size});
    }
  }
  return cases;
}

std::string name_of_case(const ::testing::TestParamInfo<std::pair<Case, int>>& tested) {
  return ::testing::PrintToString(tested.param.first) + "_on_" +
         std::to_string(tested.param.second);
}

INSTANTIATE_TEST_SUITE_P(Cases, VerifyModels, ::testing::ValuesIn(verified_cases()), name_of_case);

VerifyReport verify_heads(int world_size, const VerifyOptions& options) {
  return verify_on_ranks(world_size, [&](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<TwoHeads>(); }, rows_of_step, kLossOfHeads, kSgd,
        options);
  });
}

// The model has two independent linear layers, "left" and "right". Every step clips the gradients.
TEST(VerifyStrategies, ClippedGradientsAreThoseOfOneProcess) {
  const VerifyReport report = verify_heads(2, {.clip_norm = 0.01});
  EXPECT_TRUE(report.is_within()) << report.to_text();
}

TEST(VerifyStrategies, ADtypeOfTheOptionsIsThatOfModuleAndBatches) {
  const VerifyReport report =
      verify_heads(2, {.dtype = torch::kFloat, .strategies = {"ddp", "fsdp/after_backward"}});
  EXPECT_TRUE(report.is_within()) << report.to_text();
  EXPECT_THAT(testing::names_of(report), ElementsAre("ddp", "ddp/accumulate", "fsdp/after_backward",
                                                     "fsdp/after_backward/accumulate"));
  EXPECT_EQ(report.strategies[0].gradients.bound, 1e-5);
}

TEST(VerifyStrategies, ABatchMayHoldSeveralTensors) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<TwoHeads>(); },
        [](int64_t step) {
          return Batch{.data = rows_of_step(step),
                       .target = rows_of_step(step + 7).narrow(1, 0, 3)};
        },
        [](auto& model, const Batch& batch) {
          return (model(batch.data) - batch.target).pow(2).mean();
        },
        torch::optim::AdamOptions(0.01));
  });
  EXPECT_TRUE(report.is_within()) << report.to_text();
}

// The weight of the layer is registered under a second name, so libtorch's parameters() lists it
// twice.
struct Tied : torch::nn::Module {
  Tied() {
    first = register_module("first", torch::nn::Linear(4, 4));
    again = register_parameter("again", first->weight);
    to(torch::kDouble);
    testing::set_values(*this);
  }
  Tensor forward(const Tensor& x) { return torch::linear(torch::tanh(first(x)), again); }
  torch::nn::Linear first{nullptr};
  Tensor again;
};

TEST(VerifyStrategies, ATiedWeightIsUpdatedOnceUnderEveryStrategy) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<Tied>(); },
        [](int64_t step) { return rows_of_step(step); },
        [](auto& model, const Tensor& rows) { return model(rows).pow(2).mean(); },
        torch::optim::SGDOptions(0.1));
  });
  EXPECT_TRUE(report.is_within()) << report.to_text();
}

struct Normalized : torch::nn::Module {
  Normalized() {
    first = register_module("first", torch::nn::Linear(4, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(3));
    to(torch::kDouble);
    testing::set_values(*this);
  }
  Tensor forward(const Tensor& x) { return norm(first(x)); }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

// Each rank normalizes by the statistics of only its own rows, so the result deviates.
TEST(VerifyStrategies, StatisticsOfOneRanksRowsDeviate) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<Normalized>(); }, rows_of_step, kLossOfHeads, kSgd);
  });
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_FALSE(strategy.is_within()) << strategy.strategy;
    EXPECT_TRUE(strategy.error.empty()) << strategy.error;
    EXPECT_FALSE(strategy.loss.is_within()) << strategy.strategy;
    EXPECT_GT(strategy.gradients.difference, 1e-3) << strategy.strategy;
  }
}

TEST(VerifyStrategies, ASumInPlaceOfAMeanDeviates) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<TwoHeads>(); }, rows_of_step,
        [](auto& model, const Tensor& rows) {
          return (model(rows) - rows.narrow(1, 0, 3)).pow(2).sum();
        },
        kSgd, {.strategies = {"ddp", "zero2", "fsdp/after_forward"}});
  });
  for (const StrategyReport& strategy : report.strategies) {
    const bool has_parts = strategy.strategy.ends_with("/accumulate");
    EXPECT_NEAR(strategy.loss.difference, has_parts ? 0.75 : 0.5, 1e-9) << strategy.strategy;
    EXPECT_FALSE(strategy.gradients.is_within()) << strategy.strategy;
  }
}

TEST(VerifyStrategies, AModuleThatUsesItsRankDeviatesWithItsName) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group,
        [](const ProcessGroup& ranks) {
          auto heads = std::make_shared<TwoHeads>();
          heads->right_factor = 1 + 1e-6 * ranks.rank();
          return heads;
        },
        rows_of_step,
        // The two heads are independent, so the factor of the head "right" changes only its own
        // gradients.
        [](auto& model, const Tensor& rows) { return model(rows).mean(); }, kSgd, {.num_steps = 2});
  });
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_THAT(strategy.gradients.name, AnyOf("right.weight", "right.bias"));
    EXPECT_FALSE(strategy.gradients.is_within()) << strategy.strategy;
    EXPECT_EQ(strategy.gradients.step, 1);
    EXPECT_NEAR(strategy.gradients.difference, 6e-7, 2e-7) << strategy.strategy;
    EXPECT_THAT(strategy.parameters.name, AnyOf("right.weight", "right.bias"));
  }
  EXPECT_THAT(report.to_text(), HasSubstr("gradient of \"right."));
}

TEST(VerifyStrategies, NaNIsNotWithinAnyBound) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<TwoHeads>(); }, rows_of_step,
        [](auto& model, const Tensor& rows, const ProcessGroup& ranks) {
          const double factor = ranks.rank() == 1 ? std::numeric_limits<double>::quiet_NaN() : 1;
          return kLossOfHeads(model, rows) * factor;
        },
        kSgd,
        {.num_steps = 1,
         .strategies = {"ddp"},
         .bounds = {.loss = 0.99, .gradients = 0.99, .parameters = 0.99}});
  });
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_FALSE(strategy.loss.is_within());
    EXPECT_FALSE(strategy.gradients.is_within());
    EXPECT_FALSE(strategy.parameters.is_within());
  }
  EXPECT_FALSE(report.is_within());
}

TEST(VerifyStrategies, BoundsOfTheCallerDecide) {
  const VerifyOptions tight{.num_steps = 2, .strategies = {"ddp"}, .bounds = {.gradients = 0}};
  EXPECT_FALSE(verify_heads(3, tight).is_within());
  const auto verify_wrong_loss = [](const VerifyOptions& options) {
    return verify_on_ranks(2, [&](const ProcessGroup& group) {
      return verify_strategies(
          group, [] { return std::make_shared<TwoHeads>(); }, rows_of_step,
          [](auto& model, const Tensor& rows, const ProcessGroup& ranks) {
            return kLossOfHeads(model, rows) * (1 + 0.1 * ranks.rank());
          },
          kSgd, options);
    });
  };
  EXPECT_FALSE(verify_wrong_loss({.strategies = {"ddp"}}).is_within());
  const VerifyReport loose = verify_wrong_loss(
      {.strategies = {"ddp"}, .bounds = {.loss = 0.9, .gradients = 0.9, .parameters = 0.9}});
  EXPECT_TRUE(loose.is_within()) << loose.to_text();
}

// Runs the verification with a group that makes the same mistake on all ranks.
VerifyReport verify_with_fault(const std::vector<std::string>& strategies,
                               const std::function<void(GroupCall& call)>& on_call,
                               int world_size = 2) {
  VerifyOptions options{.num_steps = 2, .strategies = strategies};
  options.group_for = [&](const ProcessGroup& group) {
    const FakeGroup fake(group);
    fake.on_call = on_call;
    return fake.group();
  };
  return verify_heads(world_size, options);
}

TEST(VerifyFaults, AMissingReductionIsReported) {
  const VerifyReport report = verify_with_fault({"ddp", "zero1"}, [](GroupCall& call) {
    if (!call.is_reduction_of_values()) call.pass_on();
  });
  EXPECT_FALSE(report.is_within());
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_FALSE(strategy.gradients.is_within()) << strategy.strategy;
    EXPECT_EQ(strategy.gradients.step, 1) << strategy.strategy;
    EXPECT_GT(strategy.gradients.difference, 1e-2) << strategy.strategy;
  }
  // ZeroRedundancyOptimizer compares the gradients of the ranks, which the fault makes different,
  // and throws.
  EXPECT_THAT(report_of(report, "zero1").error, HasSubstr("have different gradients of"));
  EXPECT_TRUE(report_of(report, "ddp").error.empty());
}

TEST(VerifyFaults, AMissingDivisionIsReported) {
  const VerifyReport report =
      verify_with_fault({"ddp", "zero1", "zero2", "fsdp"}, [](GroupCall& call) {
        if (call.op() == ReduceOp::kAvg) call.reduce_with(ReduceOp::kSum);
        call.pass_on();
      });
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_FALSE(strategy.gradients.is_within()) << strategy.strategy;
    EXPECT_NEAR(strategy.gradients.difference, 1, 1e-9) << strategy.strategy;
    EXPECT_TRUE(strategy.error.empty()) << strategy.error;
  }
}

// The group corrupts one element of the result of each all_gather.
TEST(VerifyFaults, ACorruptedGatherIsReported) {
  const VerifyReport report =
      verify_with_fault({"fsdp/after_backward", "zero1"}, [](GroupCall& call) {
        call.pass_on();
        // The optimizer compares gradients in an all_gather of one number for each of the 4
        // parameters; that one is not corrupted.
        if (call.kind != OpKind::kAllGather || !call.is_of_values() || call.input.numel() <= 4) {
          return;
        }
        const torch::NoGradGuard no_grad;
        call.output[0] += 1e-3;
      });
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_FALSE(strategy.is_within()) << strategy.strategy;
    EXPECT_TRUE(strategy.error.empty()) << strategy.error;
  }
  EXPECT_FALSE(report_of(report, "fsdp/after_backward").loss.is_within());
  EXPECT_FALSE(report_of(report, "zero1").parameters.is_within());
}

TEST(VerifyFaults, AMissingReductionOverReplicasIsReported) {
  const VerifyReport report = verify_with_fault(
      {"hsdp"},
      [](GroupCall& call) {
        if (call.kind == OpKind::kAllReduce && call.is_reduction_of_values()) return;
        call.pass_on();
      },
      /*world_size=*/4);
  EXPECT_EQ(report.strategies.size(), 8U);
  for (const StrategyReport& strategy : report.strategies) {
    EXPECT_FALSE(strategy.gradients.is_within()) << strategy.strategy;
  }
}

// Only rank 2 gets a wrong sum, and the report has the deviation on that rank.
TEST(VerifyFaults, EveryRankComparesWhatItHas) {
  const VerifyReport report = verify_on_ranks(4, [](const ProcessGroup& group) {
    VerifyOptions options{.num_steps = 1, .strategies = {"ddp"}};
    options.group_for = [](const ProcessGroup& world) {
      const FakeGroup fake(world);
      fake.on_call = [rank = world.rank()](GroupCall& call) {
        call.pass_on();
        if (rank != 2 || !call.is_reduction_of_values()) return;
        const torch::NoGradGuard no_grad;
        call.output[0] += 1;
      };
      return fake.group();
    };
    return verify_strategies(
        group, [] { return std::make_shared<TwoHeads>(); }, rows_of_step, kLossOfHeads, kSgd,
        options);
  });
  EXPECT_FALSE(report.is_within());
  EXPECT_EQ(report.strategies[0].gradients.rank, 2) << report.to_text();
  EXPECT_TRUE(report.strategies[0].loss.is_within());
}

struct Refused : TwoHeads {
  Refused() { register_parameter("unlike", torch::zeros({2}, torch::kHalf)); }
};

// Returns the errors that `verify` throws on the ranks.
std::string error_on_ranks(int world_size,
                           const std::function<void(const ProcessGroup& group)>& verify) {
  return testing::run_groups(world_size, verify).failures();
}

TEST(VerifyStrategies, MisuseIsASentence) {
  const auto heads = [] { return std::make_shared<TwoHeads>(); };
  EXPECT_THAT(error_on_ranks(2,
                             [&](const ProcessGroup& group) {
                               verify_strategies(group, heads, rows_of_step, kLossOfHeads, kSgd,
                                                 {.strategies = {"zero3"}});
                             }),
              HasSubstr("no strategy \"zero3\" for 2 processes; there are: ddp, ddp/accumulate"));
  EXPECT_THAT(error_on_ranks(1,
                             [&](const ProcessGroup& group) {
                               verify_strategies(group, heads, rows_of_step, kLossOfHeads, kSgd,
                                                 {.num_steps = 0});
                             }),
              HasSubstr("num_steps is 0; at least one step is needed"));
  EXPECT_THAT(error_on_ranks(2,
                             [&](const ProcessGroup& group) {
                               verify_strategies(
                                   group, heads, rows_of_step,
                                   [](auto& model, const Tensor& rows) { return model(rows); },
                                   kSgd);
                             }),
              HasSubstr("loss() must return a tensor of one element"));
  EXPECT_THAT(error_on_ranks(2,
                             [&](const ProcessGroup& group) {
                               verify_strategies(
                                   group, [] { return std::make_shared<Refused>(); }, rows_of_step,
                                   kLossOfHeads, kSgd);
                             }),
              HasSubstr("parameter \"unlike\" has dtype Half, for which there are no default"));
  EXPECT_THAT(
      error_on_ranks(
          2,
          [&](const ProcessGroup& group) {
            verify_strategies(
                group, heads,
                [](int64_t step) { return std::make_pair(rows_of_step(step), torch::ones({3})); },
                [](auto& model, const auto& rows) { return kLossOfHeads(model, rows.first); },
                kSgd);
          }),
      HasSubstr("make_batch() returned tensors of 8 and of 3 rows"));
}

// If a wrapper throws for the module, the report says so, and the verification of the other
// strategies continues.
TEST(VerifyStrategies, ARefusedModuleIsInTheReport) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [] { return std::make_shared<TwoHeads>(); }, rows_of_step,
        [](auto& model, const Tensor& rows) {
          if (rows.size(0) < 8) throw std::runtime_error("needs 8 rows");
          return kLossOfHeads(model, rows);
        },
        kSgd, {.strategies = {"ddp"}});
  });
  EXPECT_FALSE(report.is_within());
  EXPECT_THAT(report_of(report, "ddp").error, HasSubstr("rank 0: needs 8 rows"));
  EXPECT_THAT(report.to_text(), HasSubstr("failed\n    rank 0: needs 8 rows\n"));
}

}  // namespace
}  // namespace cadre
