// Tests a ZeRO optimizer over DistributedDataParallel when the program replaces memory, or changes
// values or gradients, without a call of either of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/ddp_copies.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: the helpers of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

ParameterShard record_of_frozen(const std::vector<ParameterShard>& shards) {
  for (const ParameterShard& shard : shards) {
    if (shard.name == "frozen.weight") return shard;
  }
  throw Error(ErrorCode::kInternal, "no record");
}

// The ParameterShards of the wrapper and of the optimizer must keep the same tensor objects after
// the memory was replaced: an optimizer that was made before finds the state of a parameter by its
// tensor.
TEST(ZeroUnderDdp, RecordsOfFrozenParametersStayTheSameTensor) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto net = std::make_shared<Zoo>();
    Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
    const ZeroRedundancyOptimizer<SGD> zero(model, torch::optim::SGDOptions(0.1));
    const Tensor first = record_of_frozen(model.parameter_shards()).values;
    require(record_of_frozen(model.parameter_shards()).values.is_same(first),
            "two calls must return the same tensor object");
    for (const double value : {7.0, 9.0}) {
      net->frozen->weight.set_data(torch::full({11, 11}, value, torch::kDouble));
      for (const Tensor& values : {record_of_frozen(zero.parameter_shards()).values,
                                   record_of_frozen(model.parameter_shards()).values}) {
        require(values.is_same(first), "the ParameterShard has another tensor object");
        require(values.numel() == 121, "the tensor has another size than the parameter");
        require(values.const_data_ptr() == net->frozen->weight.const_data_ptr(),
                "the tensor does not share the parameter's memory");
      }
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A gather of the old values is in flight while new values are written, so the new ones must be
// gathered again.
TEST(ZeroUnderDdp, ValuesThatAreCopiedIntoShardsDuringAGatherAreUsed) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto net = std::make_shared<Zoo>();
    Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
    ZeroRedundancyOptimizer<SGD> zero(model, torch::optim::SGDOptions(0.1));
    const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
    copy.backward(4, 0);
    zero.step();
    const Tensor sum = torch::zeros({1});
    group.all_reduce(sum);  // afterwards the earlier gathers have ended on both ranks
    const torch::NoGradGuard no_grad;
    for (const ParameterShard& shard : model.parameter_shards()) {
      if (shard.memory) shard.values.fill_(0.25);
    }
    model(copy.rows(2, 1), std::pair(true, true));
    for (const NamedTensor& parameter : distinct_parameters(*net)) {
      if (!parameter.tensor.requires_grad()) continue;
      require(parameter.tensor.eq(0.25).all().item<bool>(), parameter.name);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The module has a buffer that is a view of a weight. Stage 2 throws for it, because the wrapper
// knows of the buffer.
TEST(ZeroUnderDdp, WhatElseHoldsTheMemoryOfAParameterIsLogged) {
  for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    const bool is_whole = placement == GradientPlacement::kReplicated;
    const auto log = std::make_shared<LogLines>();
    const auto result = run_groups(
        1,
        [&](const ProcessGroup& group, std::string&) {
          const auto net = std::make_shared<Zoo>();
          const NamedTensor trained = distinct_parameters(*net).front();
          const Tensor member = trained.tensor.detach();
          if (is_whole) net->register_buffer("view", member);
          Wrapped model{net, group, options_of(placement)};
          const ZeroRedundancyOptimizer<SGD> zero(model, torch::optim::SGDOptions(0.1));
          const ZeroRedundancyOptimizer<SGD> none(torch::nn::Linear(2, 2)->named_parameters(),
                                                  group, torch::optim::SGDOptions(0.1));
        },
        {.log = log});
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_THAT(log->get(),
                ElementsAre(AllOf(HasSubstr(is_whole ? "zero tensors that are not registered"
                                                     : "ddp tensors that are not registered"),
                                  HasSubstr("parameters=1"))));
  }
}

template <typename Optimizer>
std::string failure_through_a_forward_before_the_step(const ProcessGroup& group,
                                                      GradientPlacement placement) {
  const auto net = std::make_shared<Zoo>();
  Wrapped model{net, group, options_of(placement)};
  ZeroRedundancyOptimizer<Optimizer> zero(model, torch::optim::SGDOptions(0.1));
  const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
  const Tensor first = model(copy.rows(4, 0), std::pair(true, true)).mean();
  const Tensor second = model(copy.rows(4, 1), std::pair(true, true)).mean();
  first.backward();
  zero.step();
  zero.wait();
  zero.zero_grad();
  return failure_of([&] { second.backward(); });
}

// torch::optim::SGD changes values through at::Tensor::data(), which does not increment the version
// counter; the backward must throw nevertheless.
TEST(ZeroUnderDdp, ABackwardThroughAForwardBeforeAStepIsRefused) {
  for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      for (const std::string& failure :
           {failure_through_a_forward_before_the_step<SGD>(group, placement),
            failure_through_a_forward_before_the_step<torch::optim::SGD>(group, placement)}) {
        EXPECT_THAT(failure, HasSubstr("modified by an inplace operation"));
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

void write_shards(const Wrapped& model, double factor) {
  const torch::NoGradGuard no_grad;
  for (const ParameterShard& shard : model.parameter_shards()) {
    if (shard.memory) shard.values.mul_(factor);
  }
}

// A gradient that was not reduced yet exists on one rank or on both. The step must throw on both:
// the optimizer would use zeros in its place.
TEST(ZeroUnderDdp, AStepWhileGradientsWaitIsRefusedOnAllRanks) {
  for (const int num_waiting : {1, 2}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      const auto net = std::make_shared<Zoo>();
      Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
      ZeroRedundancyOptimizer<AdamW> zero(model, torch::optim::AdamWOptions(0.01));
      const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
      copy.backward(4, 0);
      zero.step();
      zero.zero_grad();
      if (group.rank() >= 2 - num_waiting) {
        const NoSync guard = model.no_sync();
        copy.backward(4, 1);
      }
      output = failure_of([&] { zero.step(); });
      zero.zero_grad();
      zero.step();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_THAT(rank.output, AllOf(HasSubstr("has a gradient that was not reduced yet"),
                                     HasSubstr("or clear the gradients")));
    }
  }
}

TEST(ZeroUnderDdp, ValuesThatChangeWhileGradientsWaitAreRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    const auto net = std::make_shared<Zoo>();
    Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
    ZeroRedundancyOptimizer<AdamW> zero(model, torch::optim::AdamWOptions(0.01).weight_decay(0.1));
    const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
    {
      const NoSync guard = model.no_sync();
      copy.backward(4, 0);
    }
    write_shards(model, 0.5);
    output = failure_of([&] { copy.backward(4, 1); });
    zero.zero_grad();
    copy.backward(4, 2);
    zero.step();
    {
      const NoSync guard = model.no_sync();
      zero.zero_grad();
      copy.backward(4, 3);
    }
    zero.zero_grad();  // no unreduced gradient is left, so values may be gathered
    write_shards(model, 0.5);
    copy.backward(4, 4);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output,
                HasSubstr("although a gradient of a backward() under no_sync() was not reduced"));
  }
}

void double_shards(const std::vector<ParameterShard>& shards) {
  const torch::NoGradGuard no_grad;
  for (const ParameterShard& shard : shards) {
    if (shard.memory) shard.values.mul_(2);
  }
}

const char* const kModified = "modified by an inplace operation";

// The backward throws, as in one process, because a tensor that the forward has saved was changed.
TEST(ZeroUnderDdp, ABackwardAfterAWriteToTheShardsIsRefused) {
  for (const int world_size : {1, 2, 3}) {
    for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
      const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
        const auto net = std::make_shared<Zoo>();
        Wrapped model{net, group, options_of(placement)};
        const ZeroRedundancyOptimizer<SGD> zero(model, torch::optim::SGDOptions(0.1));
        const Copy copy{
            .model = model, .net = *net, .rank = group.rank(), .world_size = world_size};
        const auto loss = [&](int64_t seed) {
          return model(copy.rows(4, seed), std::pair(true, true)).mean();
        };
        copy.backward(4, 0);
        Tensor last = loss(1);
        double_shards(zero.parameter_shards());
        EXPECT_THAT(failure_of([&] { last.backward(); }), HasSubstr(kModified));
        // The program doubles the shards twice: between a backward and the next forward, which is
        // allowed, and between a forward and its backward under no_sync(), which is refused.
        copy.zero_grad();
        loss(2).backward();
        double_shards(zero.parameter_shards());
        const auto no_sync = model.no_sync();
        loss(3).backward();
        last = loss(4);
        double_shards(zero.parameter_shards());
        EXPECT_THAT(failure_of([&] { last.backward(); }), HasSubstr(kModified));
      });
      EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
    }
  }
}

// Either an optimizer of the shards or the ZeRO optimizer makes a step between two forwards and
// their backwards.
TEST(ZeroUnderDdp, AStepBetweenTwoForwardsAndTheirBackwardsIsRefused) {
  for (const bool is_divided : {false, true}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const auto net = std::make_shared<Zoo>();
      Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
      std::vector<Tensor> values;
      for (const ParameterShard& shard : model.parameter_shards()) values.push_back(shard.values);
      const torch::optim::SGDOptions rate(0.1);
      const auto optimizer = is_divided
                                 ? std::unique_ptr<torch::optim::Optimizer>(
                                       std::make_unique<ZeroRedundancyOptimizer<SGD>>(model, rate))
                                 : std::make_unique<SGD>(values, rate);
      const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
      const auto loss = [&](int64_t seed) {
        return model(copy.rows(4, seed), std::pair(true, true)).mean();
      };
      const Tensor first = loss(0);
      const Tensor second = loss(1);
      first.backward();
      optimizer->step();
      const std::string failure = failure_of([&] { second.backward(); });
      EXPECT_THAT(failure, HasSubstr(is_divided ? "" : kModified));
      EXPECT_FALSE(failure.empty());
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(ZeroUnderDdp, AWriteToTheShardsOfOneRankBeforeABackwardIsAnErrorOnAllRanks) {
  for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const auto net = std::make_shared<Zoo>();
      Wrapped model{net, group, options_of(placement)};
      const ZeroRedundancyOptimizer<SGD> zero(model, torch::optim::SGDOptions(0.1));
      const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
      const Tensor loss = model(copy.rows(4, 1), std::pair(true, true)).mean();
      if (group.rank() == 0) double_shards(zero.parameter_shards());
      EXPECT_THAT(failure_of([&] { loss.backward(); }),
                  HasSubstr(group.rank() == 0 ? kModified : "rank 0 left this backward"));
      // Only rank 0 gathers parameters before its next forward, so the ranks call different
      // operations.
      EXPECT_THAT(failure_of([&] { copy.backward(4, 0); }), HasSubstr("the ranks disagree"));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(ZeroUnderDdp, AStateThatOneRankHasLostIsRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    const auto net = std::make_shared<Zoo>();
    Wrapped model{net, group, options_of(GradientPlacement::kSharded)};
    ZeroRedundancyOptimizer<AdamW> zero(model, torch::optim::AdamWOptions(0.01));
    const Copy copy{.model = model, .net = *net, .rank = group.rank(), .world_size = 2};
    copy.backward(4, 0);
    zero.step();
    if (group.rank() == 1) zero.local_optimizer().state().clear();
    output = failure_of([&] { zero.step(); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("is that of step 1, with 2 tensors on rank 0 and none on "
                                       "rank 1; give all ranks the same parameter groups"));
  }
}

}  // namespace
}  // namespace cadre
