// Tests programs that communicate in their own module or loss. The reference runs in a world of one
// process. A program whose result depends on the number of ranks must be reported as deviating, or
// throw. A program whose collectives make it correct must be within the bounds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/verify_programs.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::FakeGroup;
using testing::GroupCall;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::report_of;
using testing::rows_of_step;
using testing::Tensor;
using testing::TwoHeads;
using testing::verify_on_ranks;

const torch::optim::SGDOptions kSteps = torch::optim::SGDOptions(0.05).momentum(0.9);
const std::vector<std::string> kSome = {"ddp", "zero2", "fsdp/after_forward"};

Tensor mean_loss(auto& model, const Tensor& rows) {
  return (model(rows) - rows.narrow(1, 0, 3)).pow(2).mean();
}

std::shared_ptr<TwoHeads> make_heads() {
  return std::make_shared<TwoHeads>();
}

// Returns the error that `verify` throws, which must be equal on all ranks.
std::string error_of_ranks(int world_size, const std::function<void(const ProcessGroup&)>& verify) {
  const auto result =
      testing::run_groups(world_size, [&](const ProcessGroup& group, std::string& output) {
        output = testing::failure_of([&] { verify(group); });
        group.barrier();  // the group is still usable after the error
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, result.ranks[0].output);
  return result.ranks[0].output;
}

TEST(VerifyWorld, ALossTimesTheWorldSizeDeviates) {
  for (const bool is_divided : {false, true}) {
    const VerifyReport report = verify_on_ranks(2, [&](const ProcessGroup& group) {
      return verify_strategies(
          group, make_heads, rows_of_step,
          [&](auto& model, const Tensor& rows, const ProcessGroup& ranks) {
            const double factor = is_divided ? 1.0 / ranks.world_size() : ranks.world_size();
            return mean_loss(model, rows) * factor;
          },
          kSteps, {.num_steps = 2, .strategies = {"ddp", "fsdp/after_forward"}});
    });
    for (const StrategyReport& strategy : report.strategies) {
      EXPECT_NEAR(strategy.loss.difference, is_divided ? 0.5 : 1, 1e-9) << strategy.strategy;
      EXPECT_NEAR(strategy.gradients.difference, is_divided ? 0.5 : 1, 1e-9) << strategy.strategy;
    }
  }
}

// The reference has one rank, so it cannot run a program that uses a captured group of several
// ranks. It must throw an error that says what to do, instead of waiting for the other ranks.
TEST(VerifyWorld, ACapturedGroupIsRefusedInTheReference) {
  const auto refused = [](const auto& loss) {
    return error_of_ranks(2, [&](const ProcessGroup& group) {
      verify_strategies(
          group, make_heads, rows_of_step,
          [&](auto& model, const Tensor& rows) { return loss(group, mean_loss(model, rows)); },
          kSteps, {.num_steps = 1, .strategies = {"ddp"}});
    });
  };
  EXPECT_THAT(refused([](const ProcessGroup& group, const Tensor& loss) {
                return loss * group.world_size();
              }),
              AllOf(HasSubstr("rank 0: world_size: group"), HasSubstr("a world of one process"),
                    HasSubstr("loss(model, rows, group)")));
  EXPECT_THAT(refused([](const ProcessGroup& group, const Tensor& loss) {
                group.all_reduce(loss.detach().clone());
                return loss;
              }),
              HasSubstr("rank 0: all_reduce: group"));
  const auto of_module = error_of_ranks(2, [](const ProcessGroup& group) {
    verify_strategies(
        group, [&] { return group.rank() == 0 ? make_heads() : make_heads(); }, rows_of_step,
        [](auto& model, const Tensor& rows) { return mean_loss(model, rows); }, kSteps,
        {.num_steps = 1, .strategies = {"ddp"}});
  });
  EXPECT_THAT(of_module, HasSubstr("rank: group"));
}

// A module that subtracts from each row the mean over the rows of all ranks, through a
// differentiable collective.
struct Centered : TwoHeads {
  explicit Centered(ProcessGroup ranks) : group(std::move(ranks)) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = TwoHeads::forward(x);
    const Tensor sums = torch::cat({y.sum(0), torch::full({1}, y.size(0), y.options())});
    const Tensor all = functional::all_reduce(sums, group);
    return y - all.narrow(0, 0, 3) / all[3];
  }
  ProcessGroup group;
};

TEST(VerifyWorld, ACorrectLayerWithACollectiveIsWithin) {
  const VerifyReport report = verify_on_ranks(2, [](const ProcessGroup& group) {
    return verify_strategies(
        group, [](const ProcessGroup& ranks) { return std::make_shared<Centered>(ranks); },
        rows_of_step, [](auto& model, const Tensor& rows) { return mean_loss(model, rows); },
        kSteps, {.num_steps = 2, .strategies = {"ddp", "zero1"}});
  });
  for (const StrategyReport& strategy : report.strategies) {
    // The module subtracts the mean over the rows of a part, not of the whole batch, if gradients
    // are accumulated; so the result deviates.
    EXPECT_EQ(strategy.is_within(), !strategy.strategy.ends_with("/accumulate"))
        << report.to_text();
  }
}

TEST(VerifyWorld, FewerRowsThanPartsAreDivided) {
  for (const int num_rows : {3, 1}) {
    const VerifyReport report = verify_on_ranks(2, [&](const ProcessGroup& group) {
      return verify_strategies(
          group, make_heads,
          [&](int64_t step) { return rows_of_step(step).narrow(0, 0, num_rows); },
          [](auto& model, const Tensor& rows) { return mean_loss(model, rows); }, kSteps,
          {.num_steps = 2, .strategies = kSome});
    });
    EXPECT_EQ(report.strategies.size(), 8U);
    EXPECT_EQ(report.num_not_selected, 6);
    EXPECT_TRUE(report.is_within()) << num_rows << " rows\n" << report.to_text();
  }
}

// If one rank throws, the group of the current strategy is aborted, so only that strategy fails.
// The next strategy runs.
TEST(VerifyWorld, AFailureOfOneRankEndsItsCaseOnly) {
  const auto start = std::chrono::steady_clock::now();
  for (const bool is_exception : {true, false}) {
    const VerifyReport report = verify_on_ranks(2, [&](const ProcessGroup& group) {
      int num_calls = 0;
      return verify_strategies(group, make_heads, rows_of_step,
                               [&](auto& model, const Tensor& rows, const ProcessGroup& ranks) {
                                 if (ranks.rank() == 1 && ++num_calls == 1) {
                                   if (is_exception) throw std::runtime_error("only rank 1");
                                   throw 42;  // NOLINT: programs may throw any object
                                 }
                                 return mean_loss(model, rows);
                               },
                               kSteps,
                               {.num_steps = 1, .strategies = {"ddp", "fsdp/after_forward"}});
    });
    const StrategyReport& first = report.strategies[0];
    EXPECT_THAT(first.error, HasSubstr("rank 1: ")) << report.to_text();
    if (is_exception) EXPECT_THAT(first.error, HasSubstr("only rank 1"));
    for (size_t i = 1; i < report.strategies.size(); ++i) {
      EXPECT_TRUE(report.strategies[i].is_within()) << report.to_text();
    }
    EXPECT_FALSE(report.is_within());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, testing::kRankTimeout);
}

TEST(VerifyWorld, WhatCannotProveAnythingIsRefused) {
  const auto refused = [](const auto& make_batch, const auto& loss, double rate) {
    return error_of_ranks(2, [&](const ProcessGroup& group) {
      verify_strategies(group, make_heads, make_batch, loss, torch::optim::SGDOptions(rate),
                        {.num_steps = 2, .strategies = {"ddp"}});
    });
  };
  const auto loss = [](auto& model, const Tensor& rows) { return mean_loss(model, rows); };
  EXPECT_THAT(refused(
                  [](int64_t step) {
                    return rows_of_step(step)[0].expand({8, 4});
                  },
                  loss, 0.1),
              HasSubstr("gives every rank the same rows in every step"));
  EXPECT_THAT(refused(rows_of_step, loss, 0), HasSubstr("no parameter changes"));
  EXPECT_THAT(refused(
                  rows_of_step,
                  [](auto& model, const Tensor& rows) { return mean_loss(model, rows) * 0; }, 0.1),
              HasSubstr("every gradient is 0"));
  struct Empty : torch::nn::Module {
    Tensor forward(const Tensor& x) { return x; }
  };
  EXPECT_THAT(error_of_ranks(2,
                             [&](const ProcessGroup& group) {
                               verify_strategies(group, [] { return std::make_shared<Empty>(); },
                                                 rows_of_step, loss, kSteps,
                                                 {.strategies = {"ddp"}});
                             }),
              HasSubstr("the module has no parameters"));
}

TEST(VerifyWorld, BoundsThatEveryDeviationWouldBeWithinAreRefused) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto refused = [](const VerifyBounds& bounds) {
    return error_of_ranks(2, [&](const ProcessGroup& group) {
      // The loss is twice as large on two ranks as it should be.
      verify_strategies(group, make_heads, rows_of_step,
                        [](auto& model, const Tensor& rows, const ProcessGroup& ranks) {
                          return mean_loss(model, rows) * ranks.world_size();
                        },
                        kSteps, {.num_steps = 1, .strategies = {"ddp"}, .bounds = bounds});
    });
  };
  EXPECT_THAT(refused({.loss = infinity}), HasSubstr("a bound is inf; bounds are shares of the"));
  EXPECT_THAT(refused({.gradients = 1}), HasSubstr("a bound is 1; bounds are shares of the"));
  EXPECT_THAT(refused({.parameters = std::numeric_limits<double>::quiet_NaN()}),
              HasSubstr("a bound is nan"));
  EXPECT_THAT(refused({.parameters = -1e-3}), HasSubstr("a bound is -0.001"));
}

TEST(VerifyWorld, OptionsThatDifferBetweenRanksAreRefused) {
  const auto refused = [](const std::function<void(VerifyOptions&)>& change) {
    return error_of_ranks(2, [&](const ProcessGroup& group) {
      VerifyOptions options{.num_steps = 1, .strategies = {"ddp"}};
      if (group.rank() == 1) change(options);
      verify_strategies(
          group, make_heads, rows_of_step,
          [](auto& model, const Tensor& rows) { return mean_loss(model, rows); }, kSteps, options);
    });
  };
  EXPECT_THAT(refused([](VerifyOptions& options) { options.num_steps = 2; }),
              HasSubstr("num_steps is 1 on rank 0 and 2 on rank 1"));
  EXPECT_THAT(refused([](VerifyOptions& options) { options.strategies = {"zero1"}; }),
              HasSubstr("the list of strategies is ddp, ddp/accumulate on rank 0 and zero1"));
  EXPECT_THAT(refused([](VerifyOptions& options) { options.bounds.loss = 0.5; }),
              HasSubstr("bounds.loss is the default on rank 0"));
  EXPECT_THAT(refused([](VerifyOptions& options) { options.strategies = {"zero7"}; }),
              HasSubstr("no strategy \"zero7\""));
}

// A module whose buffer holds the mean of all rows that it has seen.
struct Remembering : TwoHeads {
  explicit Remembering(ProcessGroup ranks) : group(std::move(ranks)) {
    seen = register_buffer("seen", torch::zeros({4}, torch::kDouble));
    count = register_buffer("count", torch::zeros({}, torch::kLong));
  }
  Tensor forward(const Tensor& x) {
    const torch::NoGradGuard no_grad_for_buffers;
    count += 1;
    const Tensor mean = x.mean(0);
    group.all_reduce(mean, {.op = ReduceOp::kAvg});
    seen.mul_(0.9).add_(mean, 0.1 * (1 + error * group.rank()));
    const torch::AutoGradMode with_grad(true);
    return TwoHeads::forward(x);
  }
  ProcessGroup group;
  Tensor seen, count;
  double error = 0;
};

// Buffers are compared, too: programs evaluate with them and save them in snapshots.
TEST(VerifyWorld, TheBufferOfOneRankDeviates) {
  for (const double error : {0.0, 1e-4}) {
    const VerifyReport report = verify_on_ranks(2, [&](const ProcessGroup& group) {
      return verify_strategies(
          group,
          [&](const ProcessGroup& ranks) {
            auto made = std::make_shared<Remembering>(ranks);
            made->error = error;
            return made;
          },
          rows_of_step, [](auto& model, const Tensor& rows) { return mean_loss(model, rows); },
          kSteps, {.num_steps = 2, .strategies = {"ddp", "fsdp/after_forward"}});
    });
    EXPECT_EQ(report.is_within(), error == 0) << report.to_text();
    if (error == 0) continue;
    const StrategyReport& ddp = report_of(report, "ddp");
    EXPECT_EQ(ddp.buffers.name, "seen");
    EXPECT_EQ(ddp.buffers.rank, 1);
    EXPECT_EQ(ddp.buffers.step, 1);
    EXPECT_TRUE(ddp.gradients.is_within());
    EXPECT_THAT(report.to_text(), HasSubstr("buffer of \"seen\" in step 1 on rank 1"));
  }
}

// The test's group multiplies three elements of the result of each reduction by 1 + 1e-4.
TEST(VerifyWorld, AnErrorOfTenThousandthsInOneGradientDeviates) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    VerifyOptions options{.num_steps = 2, .dtype = dtype, .strategies = {"ddp"}};
    options.group_for = [](const ProcessGroup& group) {
      const FakeGroup fake(group);
      fake.on_call = [](GroupCall& call) {
        call.pass_on();
        if (!call.is_reduction_of_values()) return;
        const torch::NoGradGuard no_grad;
        call.output.narrow(0, 0, 3).mul_(1 + 1e-4);
      };
      return fake.group();
    };
    const VerifyReport report = verify_on_ranks(2, [&](const ProcessGroup& group) {
      return verify_strategies(
          group, make_heads, rows_of_step,
          [](auto& model, const Tensor& rows) { return mean_loss(model, rows); }, kSteps, options);
    });
    EXPECT_FALSE(report.is_within()) << report.to_text();
  }
}

// The test's group changes a gradient that is small compared with the others of the model.
TEST(VerifyWorld, AnErrorOfTenThousandthsInASmallGradientDeviates) {
  for (const double error : {0.0, 2e-4}) {
    const VerifyReport report = verify_on_ranks(2, [&](const ProcessGroup& group) {
      return verify_strategies(
          group,
          [&](const ProcessGroup& ranks) {
            auto heads = make_heads();
            heads->right_factor = 5e-4 * (1 + error * ranks.rank());
            return heads;
          },
          rows_of_step, [](auto& model, const Tensor& rows) { return mean_loss(model, rows); },
          kSteps, {.num_steps = 2, .dtype = torch::kFloat, .strategies = {"ddp"}});
    });
    EXPECT_EQ(report.is_within(), error == 0) << report.to_text();
    if (error == 0) continue;
    EXPECT_THAT(report_of(report, "ddp").gradients.name, HasSubstr("right."));
  }
}

}  // namespace
}  // namespace cadre
