// Tests programs that change parameters or shards without the knowledge of
// FullyShardedDataParallel: parameters that share memory, replaced shards, gradients from before
// the wrapping. Also tests that a constructor that throws leaves the module unchanged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/fsdp_stack.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string wrap_failure(const std::shared_ptr<Stack>& module, const ProcessGroup& group,
                         const FullyShardedDataParallelOptions& options = units_of_stack()) {
  return failure_of([&] { FullyShardedDataParallel(module, group, options); });
}

TEST(FsdpBehind, ATieByMemoryAcrossUnitsIsRefusedOnAllRanks) {
  const std::vector<std::pair<std::string, std::function<void(Stack&)>>> ties = {
      {"units", [](Stack& net) { net.second->weight.set_data(net.first->weight.detach()); }},
      {"the root and a unit",
       [](Stack& net) { net.head->weight.set_data(net.writing->weight.detach().t()); }},
      {"a part",
       [](Stack& net) { net.second->bias.set_data(net.first->weight.detach().select(0, 1)); }},
      {"a buffer", [](Stack& net) { net.register_buffer("copy", net.first->weight.detach()); }}};
  for (const auto& [what, tie] : ties) {
    on_two_ranks([&, &what = what, &tie = tie](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      if (group.rank() == 1 && what != "a buffer") tie(*net);
      if (what == "a buffer") tie(*net);
      EXPECT_THAT(wrap_failure(net, group), HasSubstr("share memory")) << what;
      EXPECT_TRUE(net->forward(stack_rows(0)).defined()) << "the module is as it was";
    });
  }
}

// Weights of two modules share memory, and each module gets its own wrapper. A wrapper cannot see
// the other module's weight, but it must log that another tensor uses the memory.
TEST(FsdpBehind, WhatElseHoldsTheMemoryOfAParameterIsLogged) {
  for (const bool is_tied : {false, true}) {
    const auto log = std::make_shared<LogLines>();
    const auto result =
        run_groups(1,
                   [&](const ProcessGroup& group, std::string&) {
                     const auto first = std::make_shared<Stack>();
                     const auto second = std::make_shared<Stack>();
                     if (is_tied) second->first->weight.set_data(first->second->weight.detach());
                     const FullyShardedDataParallel one{first, group, units_of_stack()};
                     const FullyShardedDataParallel other{second, group, units_of_stack()};
                   },
                   {.log = log});
    EXPECT_TRUE(result.ok()) << result.failures();
    if (is_tied) {
      EXPECT_THAT(
          log->get(),
          ElementsAre(
              AllOf(HasSubstr("fsdp tensors that are not registered share memory with parameters"),
                    HasSubstr("first=\"second.weight\" parameters=1"))));
    } else {
      EXPECT_THAT(log->get(), IsEmpty());
    }
  }
}

TEST(FsdpBehind, ASwapOfShardsIsNoticed) {
  for (const bool is_for_evaluation : {true, false}) {
    on_two_ranks([is_for_evaluation](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      FullyShardedDataParallel model{net, group, units_of_stack()};
      model(stack_rows(0)).sum().backward();
      std::vector<Tensor> averages;
      for (Tensor values : model.parameters()) {
        averages.push_back(values.detach().clone() * 0.5);
        values.set_data(averages.back());
      }
      const torch::AutoGradMode mode(!is_for_evaluation);
      EXPECT_THAT(failure_of([&] { model(stack_rows(0)); }),
                  AllOf(HasSubstr("this rank's shard of \""),
                        HasSubstr("has been given other memory"), HasSubstr("shard.values.copy_")));
    });
  }
}

// The program copies values into the shards, as the error of the test above recommends. The next
// forward must use them.
TEST(FsdpBehind, ValuesThatAreCopiedIntoShardsAreUsed) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    Stack plain;
    FullyShardedDataParallel model{net, group, units_of_stack()};
    for (const double factor : {0.5, 2.0}) {
      {
        const torch::NoGradGuard no_grad;
        for (const Tensor& values : model.parameters()) values.copy_(values * factor);
        for (const Tensor& values : plain.parameters()) values.mul_(factor);
        EXPECT_TRUE(torch::equal(model(stack_rows(0)), plain.forward(stack_rows(0))));
      }
      model(stack_rows(0)).sum().backward();
    }
  });
}

TEST(FsdpBehind, GradientsFromBeforeAreClearedWithThoseOfTheShards) {
  for (const bool is_cleared : {true, false}) {
    on_two_ranks([is_cleared](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      Stack plain;
      for (Stack* each : {net.get(), &plain}) each->forward(stack_rows(5)).sum().backward();
      if (is_cleared) plain.zero_grad();
      FullyShardedDataParallel model{net, group, units_of_stack()};
      torch::optim::SGD sgd(model.parameters(), 0.1);
      if (is_cleared) sgd.zero_grad();
      model(stack_rows(0)).sum().backward();
      plain.forward(stack_rows(0)).sum().backward();
      const Snapshot gradients = assembled_gradients(model, group);
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_TRUE(torch::allclose(gradients[i], plain.parameters()[i].grad(), 1e-12, 1e-14)) << i;
      }
    });
  }
}

TEST(FsdpBehind, ReduceGradientsTakesWhatTheProgramAssigns) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    FullyShardedDataParallelOptions options = units_of_stack();
    options.weighting = GradientWeighting::kEqual;
    FullyShardedDataParallel model{net, group, options};
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      for (Tensor parameter : net->parameters()) {
        parameter.mutable_grad() = torch::full(parameter.sizes(), 1.0 + group.rank(), kDouble);
      }
      model.reduce_gradients();
      for (const Tensor& gradient : assembled_gradients(model, group)) {
        ASSERT_TRUE(gradient.defined());
        EXPECT_TRUE(gradient.eq(1.5).all().item<bool>());
      }
    }
  });
}

// A parameter has a gradient from before the wrapping, and no forward uses the parameter.
// Destroying the wrapper must still work.
TEST(FsdpBehind, EndsWithAGradientThatNoStepUsed) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    net->forward(stack_rows(1)).sum().backward();
    net->uses_second = false;
    FullyShardedDataParallel model{net, group, units_of_stack()};
    model(stack_rows(0)).sum().backward();
  });
}

// A hook in the backward throws on rank 1 or on both ranks, at a point at which two units are still
// to be gathered. All ranks must get an error, and the next step must be correct.
TEST(FsdpBehind, AnExceptionOfOneRankInABackwardEndsTheStepOnAllRanks) {
  for (const int prefetched : {0, 1}) {
    for (const int failing : {1, 2}) {  // 1: on rank 1; 2: on both ranks
      on_two_ranks([&](const ProcessGroup& group) {
        const auto net = std::make_shared<Stack>();
        Stack plain;
        FullyShardedDataParallelOptions options = units_of_stack();
        options.num_prefetched = prefetched;
        FullyShardedDataParallel model{net, group, options};
        const auto step = [&] { model(stack_rows(group.rank())).pow(2).mean().backward(); };
        for (int k = 0; k < 3; ++k) {
          model.zero_grad();
          step();
        }
        for (int k = 0; k < 2; ++k) {
          const bool fails = failing == 2 || group.rank() == failing;
          if (fails) net->in_backward = [] { throw std::runtime_error("user"); };
          const std::string failure = failure_of(step);
          EXPECT_THAT(failure, HasSubstr(fails ? "user" : "kAborted"));
          if (!fails) EXPECT_THAT(failure, HasSubstr("rank 1"));
          net->in_backward = nullptr;
          model.zero_grad();
          plain.zero_grad();
          step();
          torch::cat({plain.forward(stack_rows(0)), plain.forward(stack_rows(1))})
              .pow(2)
              .mean()
              .backward();
          const Snapshot gradients = assembled_gradients(model, group);
          for (size_t i = 0; i < gradients.size(); ++i) {
            EXPECT_TRUE(torch::allclose(gradients[i], plain.parameters()[i].grad(), 1e-12, 1e-14));
          }
        }
      });
    }
  }
}

// A frozen parameter is unfrozen after the wrapping.
// LoadIntoWrappers.AParameterThatIsTrainedFromNowOn tests the steps that this error recommends.
TEST(FsdpBehind, UnfreezingSaysWhatToDo) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    net->first->weight.requires_grad_(false);
    FullyShardedDataParallel model{net, group, units_of_stack()};
    model(stack_rows(0)).sum().backward();
    net->first->weight.requires_grad_(true);
    EXPECT_THAT(failure_of([&] { model(stack_rows(0)); }),
                AllOf(HasSubstr("\"first.weight\" was frozen and requires grad now"),
                      HasSubstr("construct the module again with the change, wrap it, load the "
                                "parameters of the snapshot")));
  });
}

// One of several units cannot be sharded, on both ranks (2) or on rank 1 (1). The constructor must
// throw and leave the module unchanged.
TEST(FsdpBehind, ARefusedConstructorChangesNothing) {
  for (const int refusing : {2, 1}) {
    on_two_ranks([&](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      const bool refuses = refusing == 2 || group.rank() == refusing;
      if (refuses) net->writing->weight.mutable_grad() = torch::ones({kWide, kWide}, kDouble);
      FullyShardedDataParallelOptions options = units_of_stack();
      options.precision = {.parameters = torch::kFloat};
      const std::string failure = wrap_failure(net, group, options);
      EXPECT_THAT(failure, HasSubstr("\"writing.weight\" has a gradient in Double"));
      if (refusing == 1) EXPECT_THAT(failure, HasSubstr("on rank 1 of 2"));
      Stack plain;
      EXPECT_TRUE(torch::equal(net->forward(stack_rows(0)), plain.forward(stack_rows(0))));
      net->zero_grad();
      FullyShardedDataParallel model{net, group, units_of_stack()};
      EXPECT_TRUE(torch::equal(model(stack_rows(0)), plain.forward(stack_rows(0))));
    });
  }
}

// The module's first wrapper was destroyed, and the module has no values any more. Wrapping it
// again must throw on all ranks.
TEST(FsdpBehind, AModuleWhoseWrapperIsGoneIsRefusedOnAllRanks) {
  for (const bool has_units : {true, false}) {
    on_two_ranks([has_units](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      const FullyShardedDataParallelOptions options =
          has_units ? units_of_stack() : FullyShardedDataParallelOptions();
      { FullyShardedDataParallel(net, group, options); }
      EXPECT_THAT(wrap_failure(net, group, options),
                  HasSubstr(has_units ? "is a unit of another FullyShardedDataParallel"
                                      : "a wrapper or optimizer has sharded them already"));
      const Tensor sum = torch::ones({1});
      group.all_reduce(sum);  // shows that the group is still usable
      EXPECT_EQ(sum.item<float>(), 2);
    });
  }
}

TEST(FsdpBehind, WhatWasMovedFromOrIsNullSaysSo) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    FullyShardedDataParallel model{std::make_shared<Stack>(), group, units_of_stack()};
    ShardedOptimizer<torch::optim::SGD> sgd{model, torch::optim::SGDOptions(0.1)};
    {
      FullParameters full = model.summon_full_params();
      const FullParameters other = std::move(full);
      EXPECT_THAT(failure_of([&] { full.write_back(); }), HasSubstr("moved from"));  // NOLINT
    }
    const FullyShardedDataParallel moved = std::move(model);
    const auto other = std::move(sgd);
    const auto refuses = [](const auto& call) {
      EXPECT_THAT(failure_of(call), HasSubstr("moved from"));
    };
    refuses([&] { model(stack_rows(0)); });  // NOLINT: tests the use after the move
    refuses([&] { static_cast<void>(model.parameters()); });
    refuses([&] { static_cast<void>(model.form()); });
    refuses([&] { static_cast<void>(shard::WrapperAccess::shard_fence(model)); });
    refuses([&] { static_cast<void>(model.full_bytes()); });
    refuses([&] { static_cast<void>(model.summon_full_params()); });
    refuses([&] { model.reduce_gradients(); });
    refuses([&] { sgd.step(); });
    EXPECT_THAT(failure_of([] { fully_shard(std::shared_ptr<ShardUnit<nn::LinearImpl>>()); }),
                HasSubstr("the module is null"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The second batch is accumulated under no_sync() and then dropped, but the step still changes the
// parameters, by momentum. The next forward must use the new values, although units were kept full
// and torch::optim::SGD writes through at::Tensor::data(), which changes no version counter.
TEST(FsdpBehind, AStepWithoutTheBatchIsSeenByUnitsThatWereKeptWhole) {
  on_two_ranks([](const ProcessGroup& group) {
    const auto net = std::make_shared<Stack>();
    Stack plain;
    FullyShardedDataParallelOptions options = units_of_stack();
    options.reshard = options.reshard_root = Reshard::kAfterReduction;
    FullyShardedDataParallel model{net, group, options};
    const torch::optim::SGDOptions momentum = torch::optim::SGDOptions(0.05).momentum(0.9);
    torch::optim::SGD sgd(model.parameters(), momentum);
    torch::optim::SGD plain_sgd(plain.parameters(), momentum);
    model(stack_rows(0)).pow(2).mean().backward();
    plain.forward(stack_rows(0)).pow(2).mean().backward();
    {
      sgd.step();
      plain_sgd.step();
      sgd.zero_grad();
      const NoSync guard = model.no_sync();
      model(stack_rows(1)).sum().backward();
    }
    for (torch::optim::SGD* optimizer : {&sgd, &plain_sgd}) {
      optimizer->zero_grad(false);
      optimizer->step();
    }
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(model(stack_rows(2)), plain.forward(stack_rows(2)), 1e-12, 1e-14));
  });
}

// A hook in the backward throws on rank 1 of 4, with Reshard::kOntoGroup and groups of 2. The other
// ranks still gather units from the parts that rank 1 keeps.
TEST(FsdpBehind, AnExceptionOfOneRankEndsTheStepWhereUnitsAreKeptOntoGroups) {
  for (const int prefetched : {0, 1}) {
    const auto result = run_groups(4, [prefetched](const ProcessGroup& group) {
      const auto net = std::make_shared<Stack>();
      Stack plain;
      FullyShardedDataParallelOptions options = units_of_stack();
      options.num_prefetched = prefetched;
      options.reshard = options.reshard_root = Reshard::kOntoGroup;
      options.reshard_group_size = 2;
      FullyShardedDataParallel model{net, group, options};
      const auto step = [&] { model(stack_rows(group.rank())).pow(2).mean().backward(); };
      for (int k = 0; k < 3; ++k) {
        model.zero_grad();
        step();
      }
      for (int k = 0; k < 2; ++k) {
        const bool fails = group.rank() == 1;
        if (fails) net->in_backward = [] { throw std::runtime_error("user"); };
        EXPECT_THAT(failure_of(step), HasSubstr(fails ? "user" : "kAborted"));
        net->in_backward = nullptr;
        model.zero_grad();
        plain.zero_grad();
        step();
        std::vector<Tensor> outputs;
        for (int rank = 0; rank < 4; ++rank) outputs.push_back(plain.forward(stack_rows(rank)));
        torch::cat(outputs).pow(2).mean().backward();
        const Snapshot gradients = assembled_gradients(model, group);
        for (size_t i = 0; i < gradients.size(); ++i) {
          EXPECT_TRUE(torch::allclose(gradients[i], plain.parameters()[i].grad(), 1e-12, 1e-14));
        }
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FsdpBehind, AnOptimizerWhoseWrapperIsGoneSaysSo) {
  for (const ShardForm form : {ShardForm::kGathered, ShardForm::kMapped}) {
    on_two_ranks([form](const ProcessGroup& group) {
      FullyShardedDataParallelOptions options = units_of_stack();
      options.form = form;
      auto model = std::make_unique<FullyShardedDataParallel<Stack>>(std::make_shared<Stack>(),
                                                                     group, options);
      ShardedOptimizer<torch::optim::SGD> sgd{*model, torch::optim::SGDOptions(0.1)};
      (*model)(stack_rows(0)).sum().backward();
      model.reset();
      EXPECT_THAT(failure_of([&] { sgd.step(); }),
                  HasSubstr("the wrapper and its parameters were destroyed"));
    });
  }
}

}  // namespace
}  // namespace cadre
