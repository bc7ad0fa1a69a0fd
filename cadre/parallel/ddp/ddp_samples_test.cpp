// The mean over all samples, by default, however the batches fall on the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/data/data_loader.h"
#include "cadre/parallel/ddp/ddp_test_ranks.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

// y = 3 x + 0.5 with a spread that differs from sample to sample, so that every mean differs.
class Line : public Dataset {
 public:
  explicit Line(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  Batch get(std::span<const int64_t> indices) const override {
    const Tensor x = torch::tensor(at::IntArrayRef(indices.data(), indices.size()), torch::kDouble)
                         .view({-1, 1});
    return {.data = torch::sin(x), .target = 3 * torch::sin(x) + 0.5 + torch::cos(x * x)};
  }

 private:
  int64_t size_;
};

struct Trained {
  std::vector<double> parameters;
  std::vector<double> losses;  // of each step
};

// The recipe of docs/guide/first-program.md.
Trained run_recipe(const ProcessGroup& world, int64_t num_samples) {
  nn::Linear net(1, 1);
  net->to(torch::kDouble);
  torch::nn::init::constant_(net->weight, 0.25);
  torch::nn::init::constant_(net->bias, 0.0);
  DistributedDataParallel model{net, world};
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  DataLoader loader =
      make_data_loader(Line(num_samples),
                       {.batch_size = 10, .rank = world.rank(), .world_size = world.world_size()});
  Trained trained;
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (const auto& [x, y] : loader.epoch(epoch)) {
      optimizer.zero_grad();
      const Tensor loss = torch::mse_loss(model(x), y);
      loss.backward();
      optimizer.step();
      trained.losses.push_back(model.mean_over_ranks(loss));
    }
  }
  trained.parameters = {net->weight.item<double>(), net->bias.item<double>()};
  return trained;
}

TEST(DdpSamples, TheRecipeHasTheWeightsAndLossesOfOneProcessOnAnyNumberOfRanks) {
  Trained expected;
  ASSERT_TRUE(run_groups(1, [&](const ProcessGroup& world, std::string&) {
                expected = run_recipe(world, 101);
              }).ok());
  ASSERT_EQ(expected.losses.size(), 33u);
  for (const int world_size : {2, 3}) {
    std::vector<Trained> by_rank(static_cast<size_t>(world_size));
    const auto result = run_groups(world_size, [&](const ProcessGroup& world, std::string&) {
      by_rank[world.rank()] = run_recipe(world, 101);
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (const Trained& rank : by_rank) {
      for (size_t i = 0; i < expected.parameters.size(); ++i) {
        EXPECT_NEAR(rank.parameters[i], expected.parameters[i], 1e-12) << world_size << " ranks";
      }
      ASSERT_EQ(rank.losses.size(), expected.losses.size());
      for (size_t i = 0; i < expected.losses.size(); ++i) {
        EXPECT_NEAR(rank.losses[i], expected.losses[i], 1e-12) << world_size << " ranks";
      }
    }
  }
}

// Gradient: the mean of the rows. Rank r has r rows of the value r; rank 0 has none, and its loss
// is NaN, also by a term that no row takes part in.
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
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Forwards of several sizes in one backward have one weight only if every rank has the same share
// of each.
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
      const auto guard = model.no_sync();  // by hand, as a program that computes its own gradients
      (net->weight * 0).sum().backward();
    }
    model.reduce_gradients();
    require(std::abs(net->weight.grad().item<double>() - 1.5) < 1e-12, "the mean");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
