// Tests that sharded gradients (ZeRO stage 2) equal the corresponding slices of replicated
// gradients, bit for bit.
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/testing/torch/ddp_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

TEST(DdpSharded, EachStepEqualsReplicatedGradients) {
  for (const bool set_to_none : {true, false}) {
    expect_equal([set_to_none](const Copy& copy, const auto& compare) {
      for (int step = 0; step < 3; ++step) {
        copy.zero_grad(set_to_none);
        copy.backward(4, step);
        compare();
      }
    });
  }
}

TEST(DdpSharded, TheWrapperClearsWhatAnOptimizerWouldClear) {
  for (const bool set_to_none : {true, false}) {
    const Program program = [set_to_none](const Copy& copy, const auto& compare) {
      for (int step = 0; step < 3; ++step) {
        copy.model.zero_grad(set_to_none);
        copy.backward(4, step);
        compare();
      }
    };
    expect_equal(program, {1, 3});
  }
}

TEST(DdpSharded, ParametersThatSomeOrAllRanksLeaveOut) {
  expect_equal([](const Copy& copy, const auto& compare) {
    for (int step = 0; step < 4; ++step) {
      if (step != 2) copy.zero_grad();
      // Only the last rank uses `side`, in odd steps, and all ranks except rank 0 use `other`. Step
      // 2 adds to the gradients of step 1.
      copy.backward(4, step, {step % 2 == 1 && copy.rank == copy.world_size - 1, copy.rank != 0});
      if (step != 2) compare();
    }
  });
}

TEST(DdpSharded, UnusedByAllKeepsItsGradient) {
  expect_equal([](const Copy& copy, const auto& compare) {
    copy.backward(4, 0);
    copy.backward(4, 1, {true, false});
    Tensor kept;
    for (const ParameterShard& shard :
         copy.is_sharded() ? copy.model.parameter_shards() : std::vector<ParameterShard>{}) {
      if (shard.name == "other.weight") kept = shard.values.grad().clone();
    }
    copy.backward(4, 2, {true, false});
    for (const ParameterShard& shard :
         copy.is_sharded() ? copy.model.parameter_shards() : std::vector<ParameterShard>{}) {
      if (shard.name != "other.weight") continue;
      require(equal_bits(kept, shard.values.grad()), "the gradient that no rank used");
    }
    copy.zero_grad();
    copy.backward(4, 3);
    compare();
  });
}

TEST(DdpSharded, SeveralForwardsInOneBackward) {
  expect_equal([](const Copy& copy, const auto& compare) {
    for (int step = 0; step < 2; ++step) {
      copy.zero_grad();
      Tensor loss = copy.model(copy.rows(4, step), std::pair(true, false)).mean();
      loss = loss + copy.model(copy.rows(4, step + 9), std::pair(false, true)).mean();
      loss.backward();
      compare();
    }
  });
}

TEST(DdpSharded, AccumulationWithoutReduction) {
  expect_equal([](const Copy& copy, const auto& compare) {
    for (int step = 0; step < 3; ++step) {
      copy.zero_grad(step != 1);
      {
        const NoSync guard = copy.model.no_sync();
        copy.backward(4, 3 * step, {true, copy.rank == 0});
        copy.backward(4, 3 * step + 1, {false, false});
      }
      if (step == 2) {
        copy.model.reduce_gradients();
      } else {
        copy.backward(4, 3 * step + 2, {step == 1, false});
      }
      compare();
    }
  });
}

// Clearing the gradients of the shards must also drop gradients that were accumulated under
// no_sync().
TEST(DdpSharded, ClearedGradientsTakeTheLocalOnesWithThem) {
  for (const bool set_to_none : {true, false}) {
    expect_equal([set_to_none](const Copy& copy, const auto& compare) {
      copy.backward(4, 0);
      for (const int64_t count : {4, 2}) {
        {
          const NoSync guard = copy.model.no_sync();
          copy.backward(count, 1);
          if (count == 4) copy.zero_grad(set_to_none);
          copy.backward(count, 2);
        }
        copy.zero_grad(set_to_none);
        copy.backward(4, 3);
        compare();
        copy.zero_grad(set_to_none);
        const Tensor loss = copy.model(copy.rows(4, 4), std::pair(true, true)).mean();
        {
          const NoSync guard = copy.model.no_sync();
          copy.backward(count, 5);
        }
        copy.zero_grad(set_to_none);  // clears after a forward and before its backward
        loss.backward();
        compare();
      }
    });
  }
}

TEST(DdpSharded, UnevenAndEmptyBatches) {
  expect_equal(
      [](const Copy& copy, const auto& compare) {
        for (int step = 0; step < 3; ++step) {
          copy.zero_grad();
          // Rank 0 has no rows in step 1, so its loss is NaN; in the other steps every rank has
          // rows.
          copy.backward(step == 1 ? copy.rank : copy.rank + 1 + step, step);
          compare();
        }
      },
      {2, 3, 4, 8});
}

TEST(DdpSharded, AFrozenParameterTakesNoPart) {
  expect_equal([](const Copy& copy, const auto& compare) {
    copy.backward(4, 0);
    copy.net.other->weight.requires_grad_(false);
    for (int step = 1; step < 3; ++step) {
      copy.zero_grad();
      copy.backward(4, step);
      compare();
    }
  });
}

// Several reducing backwards run without zero_grad(). Replicated gradients are the mean of the
// earlier mean plus each rank's new gradient; sharded gradients are the sum of the means. So they
// may differ in the last bits.
TEST(DdpSharded, AReducedGradientIsAddedTo) {
  for (const int world_size : {1, 2, 3}) {
    run_pairs(world_size, [](const ProcessGroup& group, Wrapped& replicated, Wrapped& sharded) {
      const Program program = [](const Copy& copy, const auto& compare) {
        for (int step = 0; step < 3; ++step) copy.backward(4, step, {step == 1, step != 1});
        compare();
      };
      const Seen whole = run_copy(program, replicated, group);
      const Seen part = run_copy(program, sharded, group);
      for (size_t i = 0; i < part.names.size(); ++i) {
        if (!whole.gradients[0][i].defined()) continue;
        const FlatRange range = part.ranges[i];
        require(torch::allclose(whole.gradients[0][i].flatten().slice(0, range.begin, range.end),
                                part.gradients[0][i], 1e-5, 1e-7),
                part.names[i]);
      }
    });
  }
}

TEST(DdpSharded, TwoWrappersTakeTurns) {
  run_pairs(3, [](const ProcessGroup& group, Wrapped& replicated, Wrapped& sharded) {
    std::vector<Seen> seen;
    for (Wrapped* const model : {&replicated, &sharded}) {
      Wrapped other_model{std::make_shared<Zoo>(), group,
                          options_of(model == &sharded ? GradientPlacement::kSharded
                                                       : GradientPlacement::kReplicated)};
      const Program program = [&](const Copy& copy, const auto& compare) {
        const Copy other{.model = other_model,
                         .net = *other_model.module(),
                         .rank = copy.rank,
                         .world_size = copy.world_size};
        for (int step = 0; step < 2; ++step) {
          copy.zero_grad();
          other.zero_grad();
          const Tensor loss = copy.model(copy.rows(4, step), std::pair(true, true)).mean();
          other.backward(3, step, {step == 1, true});
          loss.backward();
          compare();
        }
      };
      seen.push_back(run_copy(program, *model, group));
    }
    require_slices(seen[0], seen[1]);
  });
}

// Runs a backward in whose middle a hook throws, and returns the text of the error.
std::string failure_of_backward(const Copy& copy, int64_t step) {
  Tensor weight = copy.net.down->weight;
  const unsigned hook =
      weight.register_hook([](const Tensor&) { throw std::runtime_error("planted"); });
  const std::string failure = failure_of([&] { copy.backward(4, step); });
  weight.remove_hook(hook);
  return failure;
}

// The last rank throws in every second step. All other ranks must get an error with its number, and
// the next step must be correct.
TEST(DdpSharded, AnExceptionOnOneRankEndsTheStepOnAll) {
  const Program program = [](const Copy& copy, const auto& compare) {
    const int last = copy.world_size - 1;
    for (int step = 0; step < 4; step += 2) {
      copy.zero_grad();
      if (copy.rank == last) {
        EXPECT_THAT(failure_of_backward(copy, step), HasSubstr("planted"));
      } else {
        EXPECT_THAT(failure_of([&] { copy.backward(4, step); }),
                    HasSubstr(format("rank {} left this backward", last)));
      }
      copy.zero_grad();
      copy.backward(4, step + 1);
      compare();
    }
  };
  expect_equal(program, {2, 3, 4});
}

// A backward that throws under no_sync() leaves gradients, which zero_grad() must remove.
TEST(DdpSharded, ALocalBackwardThatFailsLeavesNothingBehind) {
  const Program program = [](const Copy& copy, const auto& compare) {
    {
      const NoSync guard = copy.model.no_sync();
      EXPECT_THAT(failure_of_backward(copy, 0), HasSubstr("planted"));
    }
    copy.zero_grad();
    copy.backward(4, 1);
    compare();
  };
  expect_equal(program, {1, 3});
}

// The test applies SGD to the shards itself. The model must equal one that is trained by SGD with
// replicated gradients.
TEST(DdpSharded, StepsOnTheShardsTrainTheModel) {
  for (const int world_size : {1, 3}) {
    run_pairs(world_size, [](const ProcessGroup& group, Wrapped& replicated, Wrapped& sharded) {
      const auto step_of = [&](Wrapped& model, int64_t step) {
        const Copy copy{.model = model,
                        .net = *model.module(),
                        .rank = group.rank(),
                        .world_size = group.world_size()};
        copy.zero_grad();
        copy.backward(4, step);
      };
      for (int step = 0; step < 4; ++step) {
        step_of(replicated, step);
        step_of(sharded, step);
        const torch::NoGradGuard no_grad;
        for (const NamedTensor& parameter : distinct_parameters(*replicated.module())) {
          const Tensor& gradient = parameter.tensor.grad();
          if (gradient.defined()) parameter.tensor.sub_(gradient * 0.1);
        }
        ShardUpdate update(sharded);
        for (const ParameterShard& shard : sharded.parameter_shards()) {
          if (shard.values.grad().defined()) shard.values.sub_(shard.values.grad() * 0.1);
        }
        update.finish();
      }
      sharded(torch::zeros({1, 3}, torch::kLong), std::pair(true, true));
      const auto trained = sharded->named_parameters();
      for (const NamedTensor& expected : distinct_parameters(*replicated.module())) {
        require(equal_bits(expected.tensor, trained[expected.name]), expected.name);
      }
    });
  }
}

TEST(DdpSharded, TheOrderThatWasLearnedIsTakenOverByTheNextRun) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    DistributedDataParallelOptions options = options_of(GradientPlacement::kSharded);
    Wrapped first{std::make_shared<Zoo>(), group, options};
    const Copy copy{.model = first, .net = *first.module(), .rank = 0, .world_size = 2};
    require(!first.learned_layout(), "before the first step");
    copy.backward(4, 0);
    options.layout = first.learned_layout();
    require(options.layout.has_value(), "after the first step");
    Wrapped second{std::make_shared<Zoo>(), group, options};
    require(second.learned_layout() == options.layout, "taken over");
    require(shard::WrapperAccess::flat_parameters(first).size() == options.layout->buckets.size(),
            "as many buckets");
    options.layout->buckets.pop_back();
    const std::string failure =
        failure_of([&] { Wrapped third(std::make_shared<Zoo>(), group, options); });
    require(failure.find("the layout belongs to another model") != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// An optimizer of the module's parameters would find no gradients and train nothing, so its step()
// must throw.
TEST(DdpSharded, AnOptimizerOfTheModulesParametersIsRefused) {
  for (const int world_size : {1, 2}) {
    run_pairs(world_size, [](const ProcessGroup& group, Wrapped& replicated, Wrapped& sharded) {
      const Program program = [&](const Copy& copy, const auto& compare) {
        torch::optim::SGD sgd(copy.net.parameters(), 0.1);
        torch::optim::Adam adam(copy.net.parameters());
        for (int step = 0; step < 2; ++step) {
          copy.backward(4, step);
          for (torch::optim::Optimizer* wrong :
               std::initializer_list<torch::optim::Optimizer*>{&sgd, &adam}) {
            if (!copy.is_sharded()) continue;
            EXPECT_THAT(
                failure_of([&] { wrong->step(); }),
                HasSubstr(format("DistributedDataParallel, rank {}: the gradient of the module's "
                                 "parameter \"scale\" is gone, because it was reduced to the "
                                 "gradients of the ranks' shards. With "
                                 "GradientPlacement::kSharded make a "
                                 "cadre::ZeroRedundancyOptimizer from the wrapper; read gradients "
                                 "from the wrapper's parameter_shards(), and let zero_grad() set "
                                 "gradients to none.",
                                 group.rank())));
          }
          compare();
          copy.zero_grad();
        }
      };
      require_slices(run_copy(program, replicated, group), run_copy(program, sharded, group));
    });
  }
}

// module->zero_grad() must clear sharded gradients like replicated ones.
TEST(DdpSharded, ZeroGradOfTheModuleClearsTheShards) {
  expect_equal(
      [](const Copy& copy, const auto& compare) {
        for (int step = 0; step < 3; ++step) {
          copy.net.zero_grad();
          copy.backward(4, step);
          compare();
        }
        const Tensor loss = copy.model(copy.rows(4, 3), std::pair(true, true)).mean();
        copy.net.zero_grad();  // clears after a forward and before its backward
        loss.backward();
        compare();
      },
      {1, 3});
}

// The loss has a term that depends directly on a parameter. So the backward may reach this
// parameter before it reaches an output of the wrapper.
TEST(DdpSharded, ARegularizerAfterTheForwards) {
  expect_equal(
      [](const Copy& copy, const auto& compare) {
        const Tensor first = copy.model(copy.rows(4, 0), std::pair(true, true)).mean();
        const Tensor second = copy.model(copy.rows(4, 1), std::pair(false, true)).mean();
        first.backward();
        copy.zero_grad();
        // The forward of `second` does not use `side`.
        (second + copy.net.side->weight.pow(2).sum()).backward();
        compare();
      },
      {1, 2});
}

// A snapshot writes a frozen parameter through its ParameterShard, which must have the parameter's
// memory, also if that is channels_last.
TEST(DdpSharded, TheRecordOfAFrozenChannelsLastWeightIsItsMemory) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string&) {
    struct Images : nn::Module {
      Images() {
        frozen = register_module("frozen", nn::Conv2d(nn::Conv2dOptions(2, 3, 2)));
        head = register_module("head", nn::Conv2d(nn::Conv2dOptions(3, 1, 2)));
        frozen->weight.set_data(frozen->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
        frozen->weight.set_requires_grad(false);
      }
      Tensor forward(const Tensor& x) { return head(frozen(x)); }
      nn::Conv2d frozen{nullptr}, head{nullptr};
    };
    const auto net = std::make_shared<Images>();
    DistributedDataParallel model{net, group, {.gradients = GradientPlacement::kSharded}};
    for (const ParameterShard& shard : model.parameter_shards()) {
      if (shard.name != "frozen.weight") continue;
      const torch::NoGradGuard no_grad;
      const Tensor values = torch::arange(24, torch::kFloat).view({3, 2, 2, 2});
      Tensor(shard.values).copy_(values.view(shard.values.sizes()));
      require(torch::equal(net->frozen->weight, values), "the parameter has them");
      return;
    }
    require(false, "no record");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A parameter that no rank uses has a gradient of its own when the wrapper is destroyed. The
// destructor must leave it and remove the placeholders of the others.
TEST(DdpSharded, AGradientOfAnUnusedParameterOutlivesTheWrapper) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Zoo>();
    {
      Wrapped model{net, group, {.gradients = GradientPlacement::kSharded}};
      net->side->weight.mutable_grad() = torch::ones_like(net->side->weight);
      model(torch::zeros({2, 3}, torch::kLong), std::pair(false, false)).mean().backward();
    }
    require(!has_values(net->up->weight.grad()), "gone");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpSharded, ReplicatedGradientsHaveNoShards) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Wrapped model{std::make_shared<Zoo>(), group};
    require(shard::WrapperAccess::flat_parameters(model).empty(), "no flat parameters");
    output = failure_of([&] { model.parameter_shards(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[1].output,
              HasSubstr("DistributedDataParallel, rank 1: parameter_shards() needs the option "
                        "gradients = GradientPlacement::kSharded"));
}

}  // namespace
}  // namespace cadre
