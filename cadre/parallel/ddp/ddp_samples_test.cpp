// Tests the default weighting of gradients: they must be the mean over all samples, however the
// samples are divided among the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

// Rank r has r rows of the value r, so the gradient must be (1 * 1 + 2 * 2) / 3. Rank 0 has no
// rows. Its loss is a mean over no rows plus another term, and both are NaN.
TEST(DdpSamples, AnEmptyShareContributesZerosThoughItsLossIsNaN) {
  const auto result = run_groups(3, [](const ProcessGroup& world, std::string&) {
    nn::Linear net(nn::LinearOptions(1, 1).bias(false));
    net->to(torch::kDouble);
    DistributedDataParallel model{net, world};
    for (const bool set_to_none : {true, false}) {
      net->zero_grad(set_to_none);
      const Tensor x = torch::full({int64_t{world.rank()}, 1}, 1.0 * world.rank(), torch::kDouble);
      Tensor loss = model(x).mean();
      if (world.rank() == 0) loss = loss + net->weight.sum() * NAN;
      require((world.rank() == 0) == std::isnan(loss.item<double>()), "NaN on rank 0 alone");
      loss.backward();
      require(std::abs(net->weight.grad().item<double>() - (1 * 1 + 2 * 2) / 3.0) < 1e-12,
              format("gradient {}", net->weight.grad().item<double>()));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

double gradient_of(const ProcessGroup& world, const DistributedDataParallelOptions& options,
                   bool says_the_count) {
  nn::Linear net(nn::LinearOptions(1, 1).bias(false));
  net->to(torch::kDouble);
  DistributedDataParallel model{net, world, options};
  const Tensor x = torch::full({1 + 2 * world.rank(), 1}, 1.0 * world.rank(), torch::kDouble);
  if (says_the_count) model.set_num_samples(1 + world.rank());
  model(x).mean().backward();
  return net->weight.grad().item<double>();
}

TEST(DdpSamples, TheCountMayBeSaidOrTheRanksBeEqual) {
  const auto result = run_groups(2, [](const ProcessGroup& world, std::string&) {
    const auto expect = [](double value, double expected, const char* what) {
      require(std::abs(value - expected) < 1e-12, format("{}: {}", what, value));
    };
    expect(gradient_of(world, {}, false), 3 / 4.0, "rows");
    expect(gradient_of(world, {}, true), 2 / 3.0, "said");
    expect(gradient_of(world, {.weighting = GradientWeighting::kEqual}, false), 0.5, "equal");
    expect(gradient_of(world, {.weighting = GradientWeighting::kSum}, false), 1, "sum");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Expects `expected` as the reduced gradient if rank r has num_samples(r) samples, whose mean
// gradient is gradient(r).
template <typename NumSamples, typename Gradient>
void expect_mean(int world_size, const NumSamples& num_samples, const Gradient& gradient,
                 float expected) {
  const auto result = run_groups(world_size, [&](const ProcessGroup& world, std::string&) {
    nn::Linear net(nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model{net, world};
    model.set_num_samples(num_samples(world.rank()));
    model(torch::full({1, 1}, gradient(world.rank()))).sum().backward();
    const float got = net->weight.grad().item<float>();
    require(got == expected, format("gradient {}, expected {}", got, expected));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The mean of three gradients of 7 must be exactly 7. With weights of 1/3 it would be 7.0000005 in
// float32.
TEST(DdpSamples, EqualSharesAreRoundedOnce) {
  const auto seven = [](int) { return 7.0F; };
  expect_mean(
      3, [](int) { return 5; }, seven, 7.0F);
  expect_mean(
      3, [](int) { return 1 << 20; }, seven, 7.0F);
}

// First case: seven ranks have no samples, and the last two have n and 2 n. Ranks detect equal
// counts by comparing their sum and their sum of squares. If the square of 2 n, which is too large,
// were left out, these sums would be those of nine equal counts.
TEST(DdpSamples, UnequalSharesAreNotTakenForEqualOnes) {
  const auto num_samples = [](int rank) { return rank < 7 ? 0 : (rank - 6) * (3 << 18); };
  expect_mean(
      9, num_samples, [](int rank) { return rank < 7 ? 1000.0F : 12.0F * rank; }, 92.0F);
  expect_mean(
      3, [](int rank) { return 1 + rank; }, [](int rank) { return 6.0F * rank; }, 8.0F);
}

// Rank r passes 10 r for its r rows, so the mean over all rows must be (1 * 10 + 2 * 20) / 3. Rank
// 0 has no rows and passes NaN.
TEST(DdpSamples, TheMeanOverRanksIgnoresARankWithoutSamples) {
  const auto result = run_groups(3, [](const ProcessGroup& world, std::string&) {
    nn::Linear net(nn::LinearOptions(1, 1).bias(false));
    net->to(torch::kDouble);
    DistributedDataParallel model{net, world};
    model(torch::ones({int64_t{world.rank()}, 1}, torch::kDouble));
    const double own = world.rank() == 0 ? NAN : 10.0 * world.rank();
    const double mean = model.mean_over_ranks(torch::full({}, own, torch::kDouble));
    require(std::abs(mean - (1 * 10 + 2 * 20) / 3.0) < 1e-12, format("by rows: {}", mean));

    nn::Linear other(1, 1);
    DistributedDataParallel even{other, world, {.weighting = GradientWeighting::kEqual}};
    const double even_mean = even.mean_over_ranks(torch::full({}, 10.0 * world.rank()));
    require(std::abs(even_mean - 10) < 1e-12, format("of equal ranks: {}", even_mean));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpSamples, TheMeanOverRanksIsRefusedWhereNoRankHasASample) {
  const auto result = run_groups(2, [](const ProcessGroup& world, std::string& output) {
    nn::Linear net(1, 1);
    DistributedDataParallel model{net, world};
    const Tensor loss = model(torch::ones({0, 1})).mean();
    output = testing::failure_of([&] { model.mean_over_ranks(loss); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("no rank has a sample"));
}

// The first argument has 0 dims, such as a temperature. It must not be taken for the batch, whose
// rows are counted.
TEST(DdpSamples, AnArgumentWithoutDimensionsIsNoBatch) {
  struct Tempered : nn::Module {
    Tempered() { weight = register_parameter("weight", torch::ones({}, torch::kDouble)); }
    Tensor forward(const Tensor& temperature, const Tensor& x) {
      return (x * weight / temperature).mean();
    }
    Tensor weight;
  };
  const auto result = run_groups(2, [](const ProcessGroup& world, std::string&) {
    const auto net = std::make_shared<Tempered>();
    DistributedDataParallel model{net, world};
    const bool is_first = world.rank() == 0;
    const Tensor x = torch::full({is_first ? 3 : 1}, is_first ? 2.0 : 6.0, torch::kDouble);
    model(torch::ones({}, torch::kDouble), x).backward();
    const double gradient = net->weight.grad().item<double>();
    require(std::abs(gradient - (3 * 2.0 + 6.0) / 4) < 1e-12, format("gradient {}", gradient));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// One backward has two forwards. It is correct if each rank has the same proportion of the rows of
// both, and must throw otherwise, because a rank has only one weight.
TEST(DdpSamples, ForwardsOfSeveralSizesInOneBackwardNeedEqualShares) {
  const auto result = run_groups(2, [](const ProcessGroup& world, std::string& output) {
    nn::Linear net(nn::LinearOptions(1, 1).bias(false));
    net->to(torch::kDouble);
    DistributedDataParallel model{net, world};
    const auto both = [&](int64_t first, int64_t second) {
      net->zero_grad();
      const auto x = [&](int64_t n) {
        return torch::full({n, 1}, 1.0 + world.rank(), torch::kDouble);
      };
      (model(x(first)).mean() + model(x(second)).mean()).backward();
    };
    both(6, 3);
    require(std::abs(net->weight.grad().item<double>() - 3) < 1e-12, "one size of each");
    const int64_t factor = 1 + world.rank();
    both(2 * factor, 4 * factor);
    require(std::abs(net->weight.grad().item<double>() - 2 * 5 / 3.0) < 1e-12, "in proportion");
    output = testing::failure_of([&] { both(4, 2 + world.rank()); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(result.ranks[0].output + result.ranks[1].output, HasSubstr("one weight"));
}

TEST(DdpSamples, WithoutAForwardEveryRankCountsTheSame) {
  const auto result = run_groups(2, [](const ProcessGroup& world, std::string&) {
    nn::Linear net(nn::LinearOptions(1, 1).bias(false));
    net->to(torch::kDouble);
    DistributedDataParallel model{net, world};
    net->weight.mutable_grad() = torch::full({1, 1}, 1.0 + world.rank(), torch::kDouble);
    {
      // There is no forward; the backward comes from the parameter itself.
      const auto guard = model.no_sync();
      (net->weight * 0).sum().backward();
    }
    model.reduce_gradients();
    require(std::abs(net->weight.grad().item<double>() - 1.5) < 1e-12, "the mean");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Only one rank runs a forward, and it has no samples. Both ranks must throw the same error.
TEST(DdpSamples, WithoutASampleAForwardOnOneRankIsRefusedOnAll) {
  const auto result = run_groups(2, [](const ProcessGroup& world, std::string& output) {
    nn::Linear net(1, 1);
    DistributedDataParallel model{net, world};
    const auto step = [&] {
      if (world.rank() == 0) return model(torch::ones({0, 1})).sum().backward();
      for (Tensor& parameter : net->parameters()) {
        parameter.mutable_grad() = torch::zeros_like(parameter);
      }
      model.reduce_gradients();
    };
    output = testing::failure_of(step);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("no rank has a sample"));
}

}  // namespace
}  // namespace cadre
