// Tests replicas whose parameters become different, because a forward writes to a weight, an
// optimizer steps with gradients that are not reduced, an optimizer computes its loss more often on
// one rank, or only one rank writes values. All ranks must throw the same error at the next
// reduction. Writes that are the same on all ranks are no error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::ddp_drift {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int kRanks = 3;

// Expects `text` in the output of every rank, and equal outputs except for the rank numbers.
void expect_on_all(const testing::RanksResult& result, const std::string& text) {
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr(text));
    EXPECT_EQ(rank.output.substr(rank.output.find(':', 30)),
              result.ranks[0].output.substr(result.ranks[0].output.find(':', 30)));
  }
}

nn::Embedding embedding_with_max_norm() {
  nn::Embedding embedding(nn::EmbeddingOptions(4, 2).max_norm(1.0));
  const torch::NoGradGuard no_grad;
  embedding->weight.fill_(3.0);
  return embedding;
}

TEST(DdpDrift, AnEmbeddingWithMaxNormOfOtherRowsIsNamedOnAllRanks) {
  expect_on_all(run_groups(kRanks,
                           [](const ProcessGroup& group, std::string& output) {
                             nn::Embedding net = embedding_with_max_norm();
                             DistributedDataParallel model{net, group};
                             const Tensor rows = torch::full({2}, group.rank(), torch::kLong);
                             output = failure_of([&] { model(rows).sum().backward(); });
                             // The next backward must throw, too, because the replicas still
                             // differ.
                             require(!failure_of([&] { model(rows).sum().backward(); }).empty(),
                                     "the second step");
                           }),
                "\"weight\" has other values on rank 1 than on rank 0, because forward() writes");
}

TEST(DdpDrift, AnEmbeddingWithMaxNormOfTheSameRowsTrains) {
  const auto result = run_groups(kRanks, [](const ProcessGroup& group, std::string&) {
    nn::Embedding net = embedding_with_max_norm();
    DistributedDataParallel model{net, group};
    for (int step = 0; step < 2; ++step) {
      model(torch::tensor({0, 1}, torch::kLong)).sum().backward();
    }
    require(net->weight[0].norm().item<double>() < 1.001, "it has been normalized");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpDrift, AnEvaluationThatWritesOnOneRankIsNamedAtTheNextReduction) {
  expect_on_all(run_groups(kRanks,
                           [](const ProcessGroup& group, std::string& output) {
                             nn::Embedding net = embedding_with_max_norm();
                             DistributedDataParallel model{net, group};
                             const Tensor rows = torch::zeros({2}, torch::kLong);
                             model(rows).sum().backward();
                             if (group.rank() == 2) {
                               const torch::NoGradGuard no_grad;
                               model(torch::ones({1}, torch::kLong));
                             }
                             output = failure_of([&] { model(rows).sum().backward(); });
                           }),
                "has other values on rank 2 than on rank 0");
}

// Rank 0 twice changes a weight and restores it, as for an evaluation with averaged weights. This
// is no error. A later change that it does not restore must be an error.
TEST(DdpDrift, WeightsThatWerePutBackDoNotHideALaterChange) {
  expect_on_all(
      run_groups(kRanks,
                 [](const ProcessGroup& group, std::string& output) {
                   nn::Linear net(2, 2);
                   const torch::NoGradGuard no_grad;
                   net->weight.fill_(0.5);
                   DistributedDataParallel model{net, group};
                   const auto step = [&] {
                     const torch::AutoGradMode with_grad(true);
                     model(torch::ones({1, 2})).sum().backward();
                   };
                   step();
                   for (int swap = 0; swap < 2; ++swap) {
                     if (group.rank() == 0) net->weight.mul_(2).mul_(0.5);
                     step();
                   }
                   if (group.rank() == 0) net->weight.mul_(2);
                   output = failure_of(step);
                 }),
      "\"weight\" has other values on rank 1 than on rank 0, because the program has changed");
}

TEST(DdpDrift, AForwardThatWritesToAShardedWeightIsRefused) {
  struct Normalized : nn::Module {
    Normalized() { weight = register_parameter("weight", torch::full({3, 2}, 2.0)); }
    Tensor forward(const Tensor& x) {
      {
        const torch::NoGradGuard no_grad;
        weight.div_(weight.norm());
      }
      return torch::matmul(x, weight);
    }
    Tensor weight;
  };
  expect_on_all(
      run_groups(2,
                 [](const ProcessGroup& group, std::string& output) {
                   DistributedDataParallel model{std::make_shared<Normalized>(),
                                                 group,
                                                 {.gradients = GradientPlacement::kSharded}};
                   output = failure_of([&] { model(torch::ones({2, 3})).sum().backward(); });
                 }),
      "forward() writes to the parameter \"weight\" (on all ranks), but its values are in shards");
}

struct Line : nn::Module {
  Line() { weight = register_parameter("weight", torch::full({1}, 4.0, torch::kDouble)); }
  Tensor forward(const Tensor& x) { return (x * weight).mean(); }
  Tensor weight;
};

Tensor row_of(const ProcessGroup& group) {
  return torch::full({1}, 1.0 + group.rank(), torch::kDouble);
}

TEST(DdpDrift, AStepWithGradientsOfOneRankIsNamedAtTheNextReduction) {
  expect_on_all(run_groups(kRanks,
                           [](const ProcessGroup& group, std::string& output) {
                             const auto net = std::make_shared<Line>();
                             DistributedDataParallel model{net, group};
                             torch::optim::SGD optimizer(net->parameters(), 0.1);
                             {
                               const auto guard = model.no_sync();
                               model(row_of(group)).backward();
                             }
                             optimizer.step();
                             optimizer.zero_grad();
                             output = failure_of([&] { model(row_of(group)).backward(); });
                           }),
                "the program has changed the parameters on all ranks after a backward() under "
                "no_sync()");
}

// Rank 0 changes and restores a weight between two backwards of a step, as for an evaluation with
// averaged weights. This must be no error.
TEST(DdpDrift, ValuesThatAreChangedAndRestoredBetweenPartsOfAStepAreNoDrift) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Line>();
    DistributedDataParallel model{net, group};
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      {
        const auto guard = model.no_sync();
        model(row_of(group)).backward();
      }
      if (group.rank() == 0) {
        const torch::NoGradGuard no_grad;
        const Tensor kept = net->weight.clone();
        net->weight.fill_(1);
        net->weight.copy_(kept);
      }
      model(row_of(group)).backward();
      require(net->weight.grad().item<double>() == 3.0, "the mean of 2 and 4");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 0 computes its loss three times in a step and rank 1 twice, with an update in between, as a
// line search does that uses the loss of each rank.
TEST(DdpDrift, AnOptimizerThatComputesItsLossMoreOftenOnOneRankIsNamed) {
  expect_on_all(run_groups(2,
                           [](const ProcessGroup& group, std::string& output) {
                             const auto net = std::make_shared<Line>();
                             DistributedDataParallel model{net, group};
                             output = failure_of([&] {
                               for (int step = 0; step < 3; ++step) {
                                 const int num_calls = group.rank() == 0 ? 3 : 2;
                                 for (int call = 0; call < num_calls; ++call) {
                                   net->zero_grad();
                                   model(row_of(group)).backward();
                                   if (call + 1 == num_calls) break;
                                   const torch::NoGradGuard no_grad;
                                   net->weight.sub_(net->weight.grad() * 0.1);
                                 }
                               }
                             });
                           }),
                "a different number of times on these ranks");
}

// A linear layer with a weight of 2 x 4 elements, and a frozen weight of the same dtype.
struct Pair : nn::Module {
  explicit Pair(at::ScalarType dtype) {
    weight = register_parameter("weight", torch::full({2, 4}, 0.5, dtype));
    frozen = register_parameter("frozen", torch::ones({4}, dtype), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x) { return torch::matmul(x * frozen, weight.t()); }
  Tensor weight;
  Tensor frozen;
};

struct Change {
  at::ScalarType dtype = at::kFloat;
  GradientPlacement gradients = GradientPlacement::kReplicated;
  // The number of steps within which the change must be noticed.
  int num_steps = 1;
  std::function<void(Pair&)> on_rank_0;
};

// Makes steps that write through data(), as torch::optim::SGD does. Then rank 0 changes values: one
// of the next num_steps steps must throw an error with `text`, and so must the step after it. After
// all ranks have set equal values, steps must succeed again.
void expect_named(const Change& change, const std::string& text) {
  expect_on_all(
      run_groups(2,
                 [&](const ProcessGroup& group, std::string& output) {
                   const auto net = std::make_shared<Pair>(change.dtype);
                   DistributedDataParallel model{net, group, {.gradients = change.gradients}};
                   const auto step = [&] {
                     const torch::AutoGradMode with_grad(true);
                     model(torch::ones({1, 4}, change.dtype)).sum().backward();
                     net->weight.data().sub_(0.125);
                   };
                   const torch::NoGradGuard no_grad;
                   for (int i = 0; i < 3; ++i) step();
                   if (group.rank() == 0) change.on_rank_0(*net);
                   for (int i = 0; i < change.num_steps && output.empty(); ++i) {
                     output = failure_of(step);
                   }
                   require(!failure_of(step).empty(), "the replicas stay different");
                   net->weight.fill_(0.25);
                   net->frozen.fill_(2);
                   for (int i = 0; i < 3; ++i) step();
                 }),
      text);
}

TEST(DdpDrift, ShardedWeightsThatOneRankWritesAreNamed) {
  expect_named({.gradients = GradientPlacement::kSharded,
                .on_rank_0 = [](Pair& net) { net.weight.mul_(0.5); }},
               "\"weight\" has other values on rank 1 than on rank 0, because the program has "
               "changed the parameters a different number of times");
}

TEST(DdpDrift, AWriteThroughDataOnOneRankBetweenStepsIsNamed) {
  for (const auto gradients : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      expect_named({.dtype = dtype,
                    .gradients = gradients,
                    .on_rank_0 = [](Pair& net) { net.weight.data().mul_(0.5); }},
                   "\"weight\" has other values on rank 1 than on rank 0, because the program has "
                   "changed the parameters differently");
      expect_named({.dtype = dtype,
                    .gradients = gradients,
                    .on_rank_0 = [](Pair& net) { net.frozen.data().mul_(0.5); }},
                   "\"frozen\" has other values on rank 1");
    }
  }
}

// Each step compares another one of the 8 elements, so a difference in one element must be found
// within 8 steps.
TEST(DdpDrift, OneElementThatDiffersIsFoundInALaterStep) {
  for (int element = 0; element < 8; ++element) {
    expect_named(
        {.num_steps = 8,
         .on_rank_0 = [element](Pair& net) { net.weight.data().view(-1)[element].add_(1); }},
        "\"weight\" has other values on rank 1");
  }
}

TEST(DdpDrift, SignsOfZeroAreComparedAndEqualNansAreNoDrift) {
  expect_named({.on_rank_0 = [](Pair& net) { net.weight.data().fill_(0).neg_(); }},
               "\"weight\" has other values on rank 1");
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string&) {
    const auto net = std::make_shared<Pair>(at::kFloat);
    DistributedDataParallel model{net, group};
    net->weight.data().fill_(std::numeric_limits<float>::quiet_NaN());
    for (int i = 0; i < 3; ++i) model(torch::ones({1, 4})).sum().backward();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::ddp_drift
