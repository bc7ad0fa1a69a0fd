// Runs the training program of docs/guide/start/first-program.md on ranks as threads. With default
// options, any number of ranks must take the same steps as one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <span>
#include <string>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/data/data_loader.h"

namespace cadre {
namespace {

using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

// Samples of the line y = 3 x + 0.5, each with another deviation from it, so that the mean of
// different samples is different.
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
  std::vector<double> losses;  // one loss for each step
};

// Trains as docs/guide/start/first-program.md describes.
Trained run_recipe(const ProcessGroup& world, int64_t num_samples) {
  nn::Linear net(1, 1);
  net->to(torch::kDouble);
  torch::nn::init::constant_(net->weight, 0.25);
  torch::nn::init::constant_(net->bias, 0.0);
  DistributedDataParallel model{net, world};
  torch::optim::SGD optimizer{model->parameters(), 0.1};
  DataLoader loader = make_data_loader(Line(num_samples), {.batch_size = 10, .ranks = world});
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

TEST(DdpRecipe, HasTheWeightsAndLossesOfOneProcessOnAnyNumberOfRanks) {
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

}  // namespace
}  // namespace cadre
