// Tests gradients that are accumulated over parts of a step, whose sizes differ on a rank because
// the data loader gives the additional samples of each batch to other ranks. Every wrapper must
// give the gradient of one process with all samples.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/model_gradients.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/data/data_loader.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::LogLines;
using testing::require;
using testing::run_groups;
using ::testing::SizeIs;
namespace nn = torch::nn;

constexpr int64_t kNumSamples = 20;
constexpr double kMean = 9.5;  // the mean of the samples 0, 1, ... 19

// Sample i is the number i, so the mean of a rank's samples shows which samples it has.
struct Numbers : Dataset {
  int64_t size() const override { return kNumSamples; }
  Batch get(std::span<const int64_t> indices) const override {
    const std::vector<double> values(indices.begin(), indices.end());
    const at::Tensor data = torch::tensor(values, torch::kDouble).view({-1, 1});
    return {.data = data, .target = data};
  }
};

// The shares of this rank of the batches, which together have all samples. With batches of 9
// samples the last one has 2, so with three ranks or more some shares are empty.
std::vector<at::Tensor> own_parts_of(const ProcessGroup& world, int64_t batch_size) {
  DataLoader loader = make_data_loader(Numbers(), {.batch_size = batch_size, .ranks = world});
  std::vector<at::Tensor> parts;
  for (const auto& [data, target] : loader.epoch(0)) parts.push_back(data);
  return parts;
}

std::vector<int64_t> sizes_of(const std::vector<at::Tensor>& parts) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& part : parts) sizes.push_back(part.size(0));
  return sizes;
}

std::shared_ptr<nn::LinearImpl> one_weight() {
  const auto net = std::make_shared<nn::LinearImpl>(nn::LinearOptions(1, 1).bias(false));
  net->to(torch::kDouble);
  nn::init::ones_(net->weight);  // with a weight of 1 both the loss and the gradient are the mean
                                 // of the samples
  return net;
}

template <typename Model>
double gradient_of(Model& model, const ProcessGroup& world) {
  return shard::with_gradients_of(
      model,
      [&](std::span<const ParameterShard> shards) {
        const at::Tensor sum = torch::zeros({1}, torch::kDouble);
        for (const ParameterShard& shard : shards) {
          if (shard.values.grad().defined()) sum.add_(shard.values.grad().sum());
        }
        world.all_reduce(sum, {.op = ReduceOp::kSum});
        return sum.template item<double>();
      },
      [](auto& whole) { return whole.parameters()[0].grad().template item<double>(); });
}

// Calls use(model) with every wrapper that averages gradients.
template <typename Use>
void with_each_wrapper(const ProcessGroup& world, const Use& use) {
  {
    DistributedDataParallel model{one_weight(), world};
    use(model, "ddp");
  }
  if (world.world_size() > 1) {
    DistributedDataParallel model{one_weight(), world, {.gradients = GradientPlacement::kSharded}};
    use(model, "ddp, sharded gradients");
  }
  FullyShardedDataParallel model{one_weight(), world};
  use(model, "fsdp");
}

void expect_mean(double value, const std::string& what) {
  require(std::abs(value - kMean) < 1e-12, format("{}: {}, expected {}", what, value, kMean));
}

std::vector<std::string> warnings_of(const LogLines& log) {
  std::vector<std::string> lines = log.get();
  std::erase_if(lines, [](const std::string& line) {
    return line.find("different numbers of samples") == std::string::npos;
  });
  return lines;
}

class Accumulation : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Accumulation, ::testing::Values(1, 3, 4));

TEST_P(Accumulation, InPartsGivesTheGradientOfAllSamples) {
  const auto log = std::make_shared<LogLines>();
  const auto body = [](const ProcessGroup& world) {
    for (const int64_t batch_size : {10, 9}) {
      const std::vector<at::Tensor> parts = own_parts_of(world, batch_size);
      with_each_wrapper(world, [&](auto& model, const std::string& wrapper) {
        for (int step = 0; step < 2; ++step) {
          const std::string what = format("{}, batches of {}, step {}", wrapper, batch_size, step);
          model.zero_grad();
          const at::Tensor loss = model.backward_in_parts(
              sizes_of(parts), [&](size_t part) { return model(parts[part]).mean(); });
          expect_mean(gradient_of(model, world), what + ": the gradient");
          require(!loss.requires_grad(), what + ": the loss has a graph");
          expect_mean(model.mean_over_ranks(loss), what + ": the loss");
        }
      });
    }
  };
  const auto result = run_groups(GetParam(), body, {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(warnings_of(*log), SizeIs(0));
}

// The weights of the guide, which a program without backward_in_parts() uses.
TEST_P(Accumulation, LossesWeightedBySamplesGiveTheGradientOfAllSamples) {
  const auto log = std::make_shared<LogLines>();
  const auto body = [](const ProcessGroup& world) {
    const std::vector<at::Tensor> parts = own_parts_of(world, 10);
    const auto num_own = static_cast<double>(parts[0].size(0) + parts[1].size(0));
    with_each_wrapper(world, [&](auto& model, const std::string& what) {
      const auto backward = [&](const at::Tensor& part) {
        (model(part).mean() * (static_cast<double>(part.size(0)) / num_own)).backward();
      };
      {
        const auto guard = model.no_sync({.losses_are_weighted = true});
        backward(parts[0]);
      }
      backward(parts[1]);
      expect_mean(gradient_of(model, world), what + ", reduced by the last backward");
      model.zero_grad();
      {
        const auto guard = model.no_sync({.losses_are_weighted = true});
        for (const at::Tensor& part : parts) backward(part);
      }
      model.reduce_gradients();
      expect_mean(gradient_of(model, world), what + ", reduced by reduce_gradients()");
    });
  };
  const auto result = run_groups(GetParam(), body, {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(warnings_of(*log), SizeIs(0));
}

// The losses are divided by the number of parts, as in a program for one process. With four ranks
// every rank has parts of 3 and of 2 samples; with three ranks one rank has equal parts.
TEST_P(Accumulation, LossesDividedByTheNumberOfPartsAreLoggedIfThePartsDiffer) {
  const auto log = std::make_shared<LogLines>();
  const int world_size = GetParam();
  const auto body = [&](const ProcessGroup& world) {
    const std::vector<at::Tensor> parts = own_parts_of(world, 10);
    with_each_wrapper(world, [&](auto& model, const std::string& what) {
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        {
          const auto guard = model.no_sync();
          (model(parts[0]).mean() / 2).backward();
        }
        (model(parts[1]).mean() / 2).backward();
      }
      const double difference = std::abs(gradient_of(model, world) - kMean);
      require(world.world_size() == 1 ? difference < 1e-12 : difference > 0.1,
              format("{}: the difference is {}", what, difference));
    });
  };
  const auto result = run_groups(world_size, body, {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  const int num_ranks = world_size == 1 ? 0 : world_size == 3 ? 2 : 4;
  constexpr int kNumWrappers = 3;
  EXPECT_THAT(warnings_of(*log),
              AllOf(SizeIs(kNumWrappers * num_ranks), Each(HasSubstr("backward_in_parts()"))));
}

// No warning must be logged if the parts of a rank have equal sizes, even if they differ between
// ranks. A forward with two backwards must be counted once.
TEST(AccumulationOfEqualParts, IsNotLogged) {
  const auto log = std::make_shared<LogLines>();
  const auto result =
      run_groups(2,
                 [](const ProcessGroup& world) {
                   DistributedDataParallel model{one_weight(), world};
                   const at::Tensor x = torch::ones({2 + world.rank(), 1}, torch::kDouble);
                   {
                     const auto guard = model.no_sync();
                     (model(x).mean() / 2).backward();
                   }
                   (model(x).mean() / 2).backward();
                   model.zero_grad();
                   const at::Tensor loss = model(x).mean();
                   {
                     const auto guard = model.no_sync();
                     loss.backward({}, /*retain_graph=*/true);
                   }
                   loss.backward();
                 },
                 {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(warnings_of(*log), SizeIs(0));
}

TEST(AccumulationInParts, NeedsAPartAndCountsOfAtLeastZero) {
  const auto result = run_groups(1, [](const ProcessGroup& world) {
    DistributedDataParallel model{one_weight(), world};
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>(), std::vector<int64_t>{1, -1}}) {
      const std::string failure = testing::failure_of([&] {
        model.backward_in_parts(
            sizes, [&](size_t) -> at::Tensor { throw std::logic_error("the loss was computed"); });
      });
      require(failure.find("the number of samples of each part") != std::string::npos, failure);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
