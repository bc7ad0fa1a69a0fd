// Tests ranks that differ in the parameters that they use, in the order of use, in their models or
// in their buffers, and exceptions on one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int kReplicaWorld = 3;
constexpr auto kDouble = torch::kDouble;

// The output is the sum of x * weights[i] over the branches i that forward() gets, in that order.
// The gradient of each branch in use is sum(x).
struct Branches : nn::Module {
  Branches() {
    for (const char* name : {"a", "b", "c"}) {
      weights.push_back(register_parameter(name, torch::ones({20}, kDouble)));
    }
  }
  Tensor forward(const Tensor& x, const std::vector<int>& used) {
    Tensor sum = torch::zeros({20}, kDouble);
    for (const int branch : used) sum = sum + x * weights[branch];
    return sum.sum();
  }
  std::vector<Tensor> weights;
};

// Returns options with such small buckets that the model has several of them.
DistributedDataParallelOptions small_buckets() {
  return {.bucket_caps = {.first_bytes = 100, .bytes = 100}};
}

Tensor ones_times(double value) {
  return torch::full({20}, value, kDouble);
}

void require_gradient(const Tensor& parameter, double expected, const char* what) {
  require(parameter.grad().defined() && torch::allclose(parameter.grad(), ones_times(expected)),
          format("{}: expected {}, got {}", what, expected,
                 parameter.grad().defined() ? parameter.grad()[0].item<double>() : -1.0));
}

void expect_ok(const testing::RanksResult& result) {
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpReplicas, UnusedOnSomeRanksOnly) {
  expect_ok(run_groups(kReplicaWorld, [](const ProcessGroup& group, std::string&) {
    const auto module = std::make_shared<Branches>();
    DistributedDataParallel model{module, group, small_buckets()};
    for (int step = 0; step < 3; ++step) {
      module->zero_grad();
      // All ranks use branch 0, only rank 1 uses branch 1, and no rank uses branch 2.
      const std::vector<int> used = group.rank() == 1 ? std::vector<int>{0, 1} : std::vector{0};
      model(ones_times(group.rank() + 1), used).backward();
      require_gradient(module->weights[0], (1 + 2 + 3) / 3.0, "used by all");
      require_gradient(module->weights[1], 2 / 3.0, "used by rank 1");
      require(!module->weights[2].grad().defined(), "used by none stays undefined");
    }
  }));
}

TEST(DdpReplicas, UnusedParametersAreNamedOnceWithTheirRanks) {
  const auto log = std::make_shared<testing::LogLines>();
  expect_ok(run_groups(
      kReplicaWorld,
      [](const ProcessGroup& group, std::string&) {
        const auto module = std::make_shared<Branches>();
        DistributedDataParallel model{module, group, small_buckets()};
        model(ones_times(1), std::vector<int>{0, 1, 2}).backward();
        for (int step = 0; step < 3; ++step) {
          const std::vector<int> used = group.rank() == 1 ? std::vector<int>{0, 1} : std::vector{0};
          model(ones_times(1), used).backward();
        }
      },
      {.log = log}));
  EXPECT_THAT(log->get(), ::testing::ElementsAre(::testing::StartsWith(
                              "ddp backward left parameters unused count=2 names=\"b (ranks 0, 2); "
                              "c (all ranks)\" effect=")));
}

// Two groups of two replicas train the two parts of one module, as after parallelize_module().
TEST(DdpReplicas, UnusedParametersAreNamedOnceForAllPartsOfAModule) {
  const auto log = std::make_shared<testing::LogLines>();
  expect_ok(run_groups(
      4,
      [](const ProcessGroup& world, std::string&) {
        const int part = world.rank() % 2;
        const ProcessGroup replicas = *world.split({.color = part, .name = "replicas"});
        const auto module = std::make_shared<Branches>();
        wrap::mark_as_shard(
            module->weights[0],
            {.parameter = "a", .owner = "divided by kColwise", .rank = part, .num_ranks = 2});
        DistributedDataParallel model{module, replicas, small_buckets()};
        model(ones_times(1), std::vector<int>{0}).backward();
      },
      {.log = log}));
  EXPECT_THAT(log->get(), ::testing::ElementsAre(HasSubstr("count=2 names=\"b (all ranks); c")));
}

TEST(DdpReplicas, OnlyTheFirstUnusedParametersAreNamed) {
  struct Wide : nn::Module {
    Wide() {
      for (int i = 0; i < 30; ++i) {
        weights.push_back(register_parameter(format("w{}", i), torch::ones({1}, kDouble)));
      }
    }
    Tensor forward(const Tensor& x) { return x * weights[29]; }
    std::vector<Tensor> weights;
  };
  const auto log = std::make_shared<testing::LogLines>();
  expect_ok(run_groups(2,
                       [](const ProcessGroup& group, std::string&) {
                         DistributedDataParallel model{std::make_shared<Wide>(), group};
                         model(torch::ones({1}, kDouble)).backward();
                       },
                       {.log = log}));
  ASSERT_EQ(log->get().size(), 1u);
  EXPECT_THAT(log->get()[0], HasSubstr("count=29 names=\"w0 (all ranks); w1"));
  EXPECT_THAT(log->get()[0], HasSubstr("; w19 (all ranks); ...\""));
}

TEST(DdpReplicas, ARankWhoseLossIsZeroTakesPart) {
  expect_ok(run_groups(kReplicaWorld, [](const ProcessGroup& group, std::string&) {
    const auto module = std::make_shared<Branches>();
    DistributedDataParallel model{module, group, small_buckets()};
    const Tensor loss = model(ones_times(1), std::vector<int>{0, 1, 2});
    (group.rank() == 0 ? loss * 0 : loss).backward();
    require_gradient(module->weights[0], 2 / 3.0, "zero on rank 0");
  }));
}

TEST(DdpReplicas, OrdersThatDifferLearnRankZerosLayout) {
  const auto result = run_groups(kReplicaWorld, [](const ProcessGroup& group, std::string& output) {
    const auto module = std::make_shared<Branches>();
    DistributedDataParallel model{module, group, small_buckets()};
    const std::vector<std::vector<int>> orders = {{0, 2, 1}, {1, 0, 2}, {2, 1, 0}};
    for (int step = 0; step < 3; ++step) {
      module->zero_grad();
      model(ones_times(group.rank() + 1), orders[group.rank()]).backward();
      for (const Tensor& weight : module->weights) require_gradient(weight, 2, "any order");
    }
    output = model.learned_layout()->to_string();
  });
  expect_ok(result);
  EXPECT_EQ(result.ranks[0].output, "float64:1;float64:2;float64:0");
  EXPECT_EQ(result.ranks[1].output, result.ranks[0].output);
  EXPECT_EQ(result.ranks[2].output, result.ranks[0].output);
}

// If armed, throws in the backward after the gradient of one branch and before that of the other
// one.
struct Bomb : torch::autograd::Function<Bomb> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, bool armed) {
    context->saved_data["armed"] = armed;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    if (context->saved_data["armed"].toBool()) throw std::runtime_error("bomb");
    return {grads[0], Tensor()};
  }
};

struct Armed : Branches {
  Tensor forward(const Tensor& x, bool armed) {
    return (Bomb::apply(x * weights[0], armed) * weights[1] * weights[2]).sum();
  }
};

TEST(DdpReplicas, AnExceptionOnOneRankReachesAllAndTheNextStepIsRight) {
  expect_ok(run_groups(kReplicaWorld, [](const ProcessGroup& group, std::string&) {
    const auto module = std::make_shared<Armed>();
    DistributedDataParallel model{module, group, small_buckets()};
    for (int round = 0; round < 3; ++round) {
      const bool armed = group.rank() == 1;
      const std::string failure =
          testing::failure_of([&] { model(ones_times(group.rank() + 1), armed).backward(); });
      if (armed) {
        require(failure.find("bomb") != std::string::npos, failure);
      } else {
        require(failure.find("kAborted") != std::string::npos, failure);
        require(failure.find("rank 1 left this backward") != std::string::npos, failure);
      }
      module->zero_grad();
      model(ones_times(group.rank() + 1), false).backward();
      for (const Tensor& weight : module->weights) require_gradient(weight, 2, "after the bomb");
      module->zero_grad();
    }
  }));
}

// An exception destroys a rank's wrapper and group. The log must not say that the program has
// called abort().
TEST(DdpReplicas, AnExceptionThatEndsARankIsNotLoggedAsACallOfAbort) {
  const auto log = std::make_shared<testing::LogLines>();
  const auto result =
      run_groups(2,
                 [](const ProcessGroup& group, std::string&) {
                   DistributedDataParallel model{std::make_shared<Armed>(), group, small_buckets()};
                   model(ones_times(1), group.rank() == 1).backward();
                 },
                 {.log = log});
  EXPECT_THAT(result.ranks[1].failure, HasSubstr("bomb"));
  EXPECT_FALSE(result.ranks[0].failure.empty());
  for (const std::string& line : log->get()) {
    EXPECT_THAT(line, ::testing::Not(HasSubstr("abort() was called")));
  }
}

TEST(DdpReplicas, ModelsThatDifferAreNamedOnAllRanks) {
  const auto construct = [](const ProcessGroup& group, std::string& output) {
    const nn::Sequential model(nn::Linear(4, group.rank() == 2 ? 6 : 5), nn::Linear(6, 1));
    output = testing::failure_of([&] { DistributedDataParallel{model, group}; });
  };
  const auto result = run_groups(kReplicaWorld, construct);
  expect_ok(result);
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output,
                HasSubstr("DistributedDataParallel on group \"world\": parameter \"0.weight\" is "
                          "Float (5, 4) that requires grad on rank 0 and Float (6, 4) that "
                          "requires grad on rank 2; build the same model on all ranks"));
  }
  const auto shorter = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    nn::Sequential model(nn::Linear(4, 5));
    if (group.rank() == 1) model->push_back(nn::Linear(5, 1));
    output = testing::failure_of([&] { DistributedDataParallel{model, group}; });
  });
  EXPECT_THAT(shorter.ranks[0].output,
              HasSubstr("rank 0 has nothing more where rank 1 has parameter \"1.weight\""));
  EXPECT_EQ(shorter.ranks[0].output, shorter.ranks[1].output);
}

TEST(DdpReplicas, BuffersThatDifferAreNamedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    struct Buffered : nn::Module {
      explicit Buffered(int64_t size) {
        register_parameter("weight", torch::ones({1}));
        register_buffer("mean", torch::zeros({size}));
      }
    };
    const auto model = std::make_shared<Buffered>(3 + group.rank());
    output = testing::failure_of([&] { DistributedDataParallel{model, group}; });
  });
  expect_ok(result);
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output,
                HasSubstr("buffer \"mean\" is Float (3) on rank 0 and Float (4) on rank 1"));
  }
}

TEST(DdpReplicas, RankZerosParametersAndBuffersOfAnyDType) {
  expect_ok(run_groups(kReplicaWorld, [](const ProcessGroup& group, std::string&) {
    const double own = group.rank() + 7;
    struct Module : nn::Module {
      Tensor forward(const Tensor& x) { return x * weight; }
      Tensor weight, mask, half;
    };
    const auto module = std::make_shared<Module>();
    module->weight = module->register_parameter("weight", torch::full({2, 3}, own));
    module->mask = module->register_buffer(
        "mask", torch::full({4}, group.rank() == 0, torch::TensorOptions(torch::kBool)));
    module->half = module->register_buffer("half", torch::full({2, 3}, own, torch::kHalf).t());
    DistributedDataParallel model{module, group};
    require(torch::equal(module->weight, torch::full({2, 3}, 7.0)), "rank 0's parameter");
    require(module->mask.all().item<bool>(), "rank 0's boolean buffer");
    require(torch::equal(module->half, torch::full({3, 2}, 7.0, torch::kHalf)),
            "rank 0's transposed half buffer");
  }));
}

TEST(DdpReplicas, BatchNormKeepsRankZerosStatisticsAlsoOverTwoForwards) {
  expect_ok(run_groups(2, [](const ProcessGroup& group, std::string&) {
    nn::BatchNorm1d norm(3);
    norm->to(kDouble);
    DistributedDataParallel model{norm, group};
    const auto data = [&](int step) {
      return torch::linspace(0, 1 + step + 10.0 * group.rank(), 12, kDouble).view({4, 3});
    };
    // Two forwards precede one backward: the buffer broadcast of the second forward must not break
    // the backward of the first one.
    const Tensor first = model(data(0)).pow(3).sum();
    const Tensor second = model(data(1)).pow(3).sum();
    (first + second).backward();
    model(data(2)).sum().backward();
    // The expected buffers are those of rank 0 after steps 0 and 1, which all ranks got before the
    // forward of step 2.
    nn::BatchNorm1d reference(3);
    reference->to(kDouble);
    for (const int step : {0, 1}) {
      reference->forward(torch::linspace(0, 1 + step, 12, kDouble).view({4, 3}));
    }
    reference->forward(data(2));
    require(torch::allclose(norm->running_mean, reference->running_mean), "running_mean");
    require(norm->num_batches_tracked.item<int64_t>() == 3, "num_batches_tracked");
    // A forward without grad on one rank only must not communicate.
    if (group.rank() == 0) {
      const torch::NoGradGuard no_grad;
      model(data(3));
    }
  }));
}

// Each forward reads the buffer and then writes another number into it on each rank. The next
// forward must read the number of rank 0 or, with broadcast_buffers = false, its own.
TEST(DdpReplicas, BuffersAreRankZerosInEachForwardUnlessSwitchedOff) {
  struct Counting : nn::Module {
    Counting() {
      weight = register_parameter("weight", torch::ones({1}, kDouble));
      buffer = register_buffer("buffer", torch::zeros({1}, kDouble));
    }
    Tensor forward(double own) {
      found.push_back(buffer.item<double>());
      buffer.fill_(own);
      return weight * 1;
    }
    Tensor weight, buffer;
    std::vector<double> found;
  };
  for (const bool broadcasts : {true, false}) {
    expect_ok(run_groups(kReplicaWorld, [&](const ProcessGroup& group, std::string&) {
      const auto module = std::make_shared<Counting>();
      DistributedDataParallel model{module, group, {.broadcast_buffers = broadcasts}};
      for (int step = 1; step <= 3; ++step) model(step + 10.0 * group.rank()).backward();
      const double other = broadcasts ? 0 : 10.0 * group.rank();
      require(module->found == std::vector<double>{0, 1 + other, 2 + other},
              format("broadcast {}: found {}, {}, {}", broadcasts, module->found[0],
                     module->found[1], module->found[2]));
    }));
  }
}

// The layers are registered in another order than they are used. So the learned layout differs from
// the first guess, which is the reverse order of registration. One bucket has more than 64 KiB.
struct OutOfOrder : nn::Module {
  OutOfOrder() {
    last = register_module("last", nn::Linear(130, 70));
    first = register_module("first", nn::Linear(70, 130));
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : parameters()) {
      parameter.copy_(torch::sin(torch::arange(parameter.numel())).view_as(parameter) * 0.1);
    }
  }
  Tensor forward(const Tensor& x) { return last(torch::tanh(first(x))); }
  nn::Linear last{nullptr}, first{nullptr};
};

using Weights = std::vector<Tensor>;

// Runs the steps [from, to), beginning with `weights` or, if the list is empty, with the module's
// initial weights. Writes the final weights to `weights`.
void run_over_tcp(int from, int to, const std::optional<BucketLayout>& layout, Weights& weights,
                  std::optional<BucketLayout>& learned) {
  std::vector<Weights> by_rank(kReplicaWorld);
  const auto result =
      run_groups(kReplicaWorld,
                 [&](const ProcessGroup& group, std::string& output) {
                   const auto net = std::make_shared<OutOfOrder>();
                   for (size_t i = 0; i < weights.size(); ++i) {
                     const torch::NoGradGuard no_grad;
                     net->parameters()[i].copy_(weights[i]);
                   }
                   DistributedDataParallelOptions options;
                   options.layout = layout;
                   DistributedDataParallel model{net, group, options};
                   torch::optim::SGD optimizer(net->parameters(), 0.05);
                   for (int step = from; step < to; ++step) {
                     optimizer.zero_grad();
                     const Tensor seeds = torch::arange(280) + 1000.0 * step + 300.0 * group.rank();
                     model(torch::sin(seeds * seeds).view({4, 70})).pow(2).mean().backward();
                     optimizer.step();
                   }
                   for (const Tensor& parameter : net->parameters()) {
                     by_rank[group.rank()].push_back(parameter.detach().clone());
                   }
                   output = model.learned_layout()->to_string();
                 },
                 {.transport = TransportChoice::kTcp});
  ASSERT_TRUE(result.ok()) << result.failures();
  for (size_t i = 0; i < by_rank[0].size(); ++i) {
    EXPECT_TRUE(torch::equal(by_rank[0][i], by_rank[2][i])) << "all ranks have the same bits";
  }
  weights = by_rank[0];
  learned = BucketLayout::parse(result.ranks[0].output);
}

bool have_the_same_bits(const Weights& a, const Weights& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

// Training is interrupted after 3 of 6 steps and resumed with the learned layout, over TCP; the
// result must have the same bits. The last part resumes without the layout and must give other
// bits: over TCP the position of a gradient in its bucket determines the order of the additions.
TEST(DdpReplicas, ResumingWithTheLearnedLayoutKeepsTheBits) {
  Weights whole, half;
  std::optional<BucketLayout> learned;
  run_over_tcp(0, 6, std::nullopt, whole, learned);
  run_over_tcp(0, 3, std::nullopt, half, learned);
  EXPECT_NE(learned->to_string(), "float32:3,2,1,0") << "not the first guess";
  Weights resumed = half;
  std::optional<BucketLayout> kept;
  run_over_tcp(3, 6, learned, resumed, kept);
  EXPECT_EQ(*kept, *learned);
  EXPECT_TRUE(have_the_same_bits(whole, resumed));
  Weights without_layout = half;
  run_over_tcp(3, 6, std::nullopt, without_layout, kept);
  EXPECT_FALSE(have_the_same_bits(whole, without_layout)) << "the layout does not reach the bits";
}

}  // namespace
}  // namespace cadre
