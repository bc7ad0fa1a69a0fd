// Trains networks with synchronous batch normalization under each wrapper, with shares that differ
// in size, and compares with BatchNorm in one process that trains on the whole batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/batchnorm/sync_batch_norm.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/tensor/hooks/autocast.h"
#include "cadre/testing/torch/fsdp_training.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre {
namespace {

using testing::expect_on_ranks;
using testing::require;
using testing::require_refused;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int kSteps = 4;
constexpr int64_t kRows = 11;

// A residual network whose batch normalizations are members of their types.
struct ResNet : nn::Module {
  ResNet() {
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1).bias(false)));
    bn1 = register_module("bn1", nn::BatchNorm2d(4));
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1).bias(false)));
    bn2 = register_module("bn2", nn::BatchNorm2d(nn::BatchNormOptions(4).momentum(std::nullopt)));
    hidden = register_module("hidden", nn::Linear(4, 5));
    bn3 = register_module("bn3", nn::BatchNorm1d(nn::BatchNormOptions(5).affine(false)));
    head = register_module("head", nn::Linear(5, 2));
    to(torch::kDouble);
    testing::set_values(*this);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::tanh(bn1(stem(x)));
    const Tensor block = torch::relu(bn2(conv(h)) + h).mean({2, 3});
    return head(torch::tanh(bn3(hidden(block))));
  }
  nn::Conv2d stem{nullptr}, conv{nullptr};
  nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  nn::BatchNorm1d bn3{nullptr};
  nn::Linear hidden{nullptr}, head{nullptr};
};

Tensor batch_of(int step) {
  const Tensor values = torch::arange(kRows * 2 * 3 * 3, torch::kDouble) * 0.37 + step;
  return torch::sin(values).view({kRows, 2, 3, 3}) + torch::arange(2).view({1, 2, 1, 1});
}

Tensor loss_of(const Tensor& output) {
  return (output.pow(2) + torch::sin(output)).sum(1).mean();
}

// The numbers of rows of each rank, which are kRows together.
using Sizes = std::vector<int64_t>;

Tensor rows_of(int step, const Sizes& sizes, int rank) {
  int64_t begin = 0;
  for (int other = 0; other < rank; ++other) begin += sizes[static_cast<size_t>(other)];
  return batch_of(step).narrow(0, begin, sizes[static_cast<size_t>(rank)]);
}

std::vector<Tensor> buffers_of(const nn::Module& net) {
  std::vector<Tensor> buffers;
  for (const auto& buffer : net.buffers()) buffers.push_back(buffer.detach().clone());
  return buffers;
}

struct Trained {
  std::vector<Tensor> parameters;
  std::vector<Tensor> buffers;
};

torch::optim::SGDOptions sgd_options() {
  return torch::optim::SGDOptions(0.1).momentum(0.9);
}

Trained train_alone(const std::function<void(ResNet&, const Tensor&)>& backward) {
  ResNet net;
  torch::optim::SGD sgd(net.parameters(), sgd_options());
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad();
    backward(net, batch_of(step));
    sgd.step();
  }
  return {.parameters = testing::copies_of(net.parameters()), .buffers = buffers_of(net)};
}

void whole_batch(ResNet& net, const Tensor& batch) {
  loss_of(net.forward(batch)).backward();
}

void require_same(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                  const std::string& what, double tolerance = 1e-10) {
  require(actual.size() == expected.size(), what);
  for (size_t i = 0; i < expected.size(); ++i) {
    require(torch::allclose(actual[i].to(torch::kDouble), expected[i].to(torch::kDouble), tolerance,
                            tolerance),
            format("{} {} differs by {}", what, i,
                   (actual[i] - expected[i]).abs().max().item<double>()));
  }
}

const std::vector<Sizes>& all_shares() {
  static const std::vector<Sizes> shares = {{11},      {6, 5},    {9, 2},
                                            {2, 4, 5}, {7, 0, 4}, {2, 3, 4, 2}};
  return shares;
}

TEST(SyncBatchNormTraining, DistributedDataParallelTrainsAsOneProcess) {
  const Trained expected = train_alone(whole_batch);
  for (const Sizes& sizes : all_shares()) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    expect_on_ranks(static_cast<int>(sizes.size()), [&](const ProcessGroup& group) {
      const auto net = std::make_shared<ResNet>();
      convert_sync_batchnorm(*net, group);
      DistributedDataParallel model{net, group};
      torch::optim::SGD sgd(model.parameters(), sgd_options());
      for (int step = 0; step < kSteps; ++step) {
        sgd.zero_grad();
        loss_of(model(rows_of(step, sizes, group.rank()))).backward();
        sgd.step();
      }
      require_same(net->parameters(), expected.parameters, "parameter");
      require_same(net->buffers(), expected.buffers, "buffer");
    });
  }
}

// The losses are divided by the samples of all ranks, and gradients are summed.
TEST(SyncBatchNormTraining, SummedGradientsAreThoseOfOneProcess) {
  const Trained expected = train_alone(whole_batch);
  const Sizes sizes = {2, 4, 5};
  expect_on_ranks(3, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<ResNet>();
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel model{net, group, {.weighting = GradientWeighting::kSum}};
    torch::optim::SGD sgd(model.parameters(), sgd_options());
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      const Tensor rows = rows_of(step, sizes, group.rank());
      (loss_of(model(rows)) * (static_cast<double>(rows.size(0)) / kRows)).backward();
      sgd.step();
    }
    require_same(net->parameters(), expected.parameters, "parameter");
  });
}

// A step has two parts, rows 0 to 5 and rows 6 to 10, of which the ranks have other shares.
struct Parts {
  Sizes begins;
  Sizes sizes;
};

Parts parts_of(int rank) {
  return rank == 0 ? Parts{.begins = {0, 6}, .sizes = {2, 3}}
                   : Parts{.begins = {2, 9}, .sizes = {4, 2}};
}

Trained train_in_parts_alone() {
  return train_alone([](ResNet& net, const Tensor& batch) {
    (loss_of(net.forward(batch.narrow(0, 0, 6))) * (6.0 / kRows)).backward();
    (loss_of(net.forward(batch.narrow(0, 6, 5))) * (5.0 / kRows)).backward();
  });
}

TEST(SyncBatchNormTraining, PartsOfUnequalSizesAreWeightedAsTheyAreReduced) {
  const Trained expected = train_in_parts_alone();
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const Parts parts = parts_of(group.rank());
    const auto net = std::make_shared<ResNet>();
    convert_sync_batchnorm(*net, group);
    // Rank 0's buffers would be sent before the last part only; they are equal on all ranks.
    DistributedDataParallel model{net, group};
    torch::optim::SGD sgd(model.parameters(), sgd_options());
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      model.backward_in_parts(parts.sizes, [&](size_t i) {
        return loss_of(model(batch_of(step).narrow(0, parts.begins[i], parts.sizes[i])));
      });
      sgd.step();
    }
    require_same(net->parameters(), expected.parameters, "parameter");
    require_same(net->buffers(), expected.buffers, "buffer");
  });
}

// The weights of the ranks are not known yet under no_sync(), so they must turn out to be equal.
TEST(SyncBatchNormTraining, AccumulationUnderNoSyncNeedsEqualSamples) {
  const Trained expected = train_alone([](ResNet& net, const Tensor& batch) {
    (loss_of(net.forward(batch.narrow(0, 0, 4))) / 2).backward();
    (loss_of(net.forward(batch.narrow(0, 4, 4))) / 2).backward();
  });
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<ResNet>();
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel model{net, group};
    torch::optim::SGD sgd(model.parameters(), sgd_options());
    const auto backward = [&](const Tensor& rows) { (loss_of(model(rows)) / 2).backward(); };
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      {
        const auto guard = model.no_sync();
        backward(batch_of(step).narrow(0, 2 * group.rank(), 2));
      }
      backward(batch_of(step).narrow(0, 4 + 2 * group.rank(), 2));
      sgd.step();
    }
    require_same(net->parameters(), expected.parameters, "parameter");
    sgd.zero_grad();
    {
      const auto guard = model.no_sync();
      backward(batch_of(0).narrow(0, 0, 2 + group.rank()));
    }
    require_refused([&] { backward(batch_of(0).narrow(0, 4, 2)); }, "samples");
  });
}

// The statistics of all ranks have the rows of such a rank, so their gradients would be lost.
TEST(SyncBatchNormTraining, RowsThatCountAsNoSamplesAreRefused) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto net = std::make_shared<ResNet>();
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel model{net, group};
    model.set_num_samples(group.rank() == 1 ? 0 : 5);
    const Tensor loss = loss_of(model(rows_of(0, {5, 6}, group.rank())));
    const std::string message = testing::failure_of([&] { loss.backward(); });
    require(message.find(group.rank() == 1 ? "set_num_samples(0)" : "rank 1") != std::string::npos,
            message);
  });
}

TEST(SyncBatchNormTraining, ShardedGradientsAndOptimizerTrainAsOneProcess) {
  const Trained expected = train_alone(whole_batch);
  for (const Sizes& sizes : {Sizes{6, 5}, Sizes{7, 0, 4}}) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    expect_on_ranks(static_cast<int>(sizes.size()), [&](const ProcessGroup& group) {
      const auto net = std::make_shared<ResNet>();
      convert_sync_batchnorm(*net, group);
      DistributedDataParallel model{net, group, {.gradients = GradientPlacement::kSharded}};
      ZeroRedundancyOptimizer<torch::optim::SGD> zero{model, sgd_options()};
      for (int step = 0; step < kSteps; ++step) {
        zero.zero_grad();
        loss_of(model(rows_of(step, sizes, group.rank()))).backward();
        zero.step();
      }
      zero.wait();
      require_same(net->parameters(), expected.parameters, "parameter");
      require_same(net->buffers(), expected.buffers, "buffer");
    });
  }
}

// The units' parameters are observed by the same operations that are synchronous.
TEST(SyncBatchNormTraining, FullyShardedDataParallelTrainsAsOneProcess) {
  const Trained expected = train_alone(whole_batch);
  for (const Sizes& sizes : {Sizes{11}, Sizes{6, 5}, Sizes{7, 0, 4}}) {
    for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kAfterBackward}) {
      expect_on_ranks(static_cast<int>(sizes.size()), [&](const ProcessGroup& group) {
        const auto net = std::make_shared<ResNet>();
        convert_sync_batchnorm(*net, group);
        FullyShardedDataParallelOptions options;
        options.reshard = reshard;
        options.wrap_policy = [](const WrapCandidate& candidate) {
          return !candidate.module.parameters(/*recurse=*/false).empty();
        };
        FullyShardedDataParallel model{net, group, options};
        torch::optim::SGD sgd(model.parameters(), sgd_options());
        for (int step = 0; step < kSteps; ++step) {
          sgd.zero_grad();
          loss_of(model(rows_of(step, sizes, group.rank()))).backward();
          sgd.step();
        }
        require_same(testing::assembled_parameters(model, group), expected.parameters, "parameter");
        require_same(net->buffers(), expected.buffers, "buffer");
      });
    }
  }
}

struct BlockImpl : nn::Module {
  BlockImpl() {
    linear = register_module("linear", nn::Linear(18, 6));
    norm = register_module("norm", nn::BatchNorm1d(6));
    to(torch::kDouble);
    testing::set_values(*this);
  }
  Tensor forward(const Tensor& x) { return torch::tanh(norm(linear(x))); }
  nn::Linear linear{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
using Recomputed = nn::ModuleHolder<ActivationCheckpoint<BlockImpl>>;

// The recomputation in backward exchanges the statistics again.
TEST(SyncBatchNormTraining, RecomputedActivationsTrainAsOneProcess) {
  const auto train = [](auto& model, nn::Module& net, const std::function<Tensor(int)>& rows) {
    torch::optim::SGD sgd(net.parameters(), sgd_options());
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      // The weights are used by the backward of a checkpoint only if its input needs a gradient.
      loss_of(model->forward(rows(step).flatten(1).requires_grad_())).backward();
      sgd.step();
    }
  };
  Recomputed alone;
  train(alone, *alone, batch_of);
  const auto expected = testing::copies_of(alone->parameters());
  const auto buffers = buffers_of(*alone);
  for (const Sizes& sizes : {Sizes{6, 5}, Sizes{7, 0, 4}}) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    expect_on_ranks(static_cast<int>(sizes.size()), [&](const ProcessGroup& group) {
      Recomputed net;
      convert_sync_batchnorm(*net, group);
      auto model =
          std::make_shared<DistributedDataParallel<ActivationCheckpoint<BlockImpl>>>(net, group);
      train(model, *net, [&](int step) { return rows_of(step, sizes, group.rank()); });
      require_same(net->parameters(), expected, "parameter");
      require_same(net->buffers(), buffers, "buffer");
    });
  }
}

TEST(SyncBatchNormTraining, AutocastComputesStatisticsInFloat32) {
  const auto make = [] {
    auto net = std::make_shared<ResNet>();
    net->to(torch::kFloat);
    return net;
  };
  const auto outputs_of = [](auto& net, const Tensor& rows) {
    const Autocast autocast;
    return net->forward(rows.to(torch::kFloat)).to(torch::kDouble);
  };
  const auto alone = make();
  const Tensor whole = outputs_of(alone, batch_of(0));
  loss_of(whole).backward();
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto net = make();
    convert_sync_batchnorm(*net, group);
    auto model = std::make_shared<DistributedDataParallel<ResNet>>(net, group);
    const Sizes sizes = {7, 4};
    const Tensor own = outputs_of(model, rows_of(0, sizes, group.rank()));
    const int64_t begin = group.rank() == 0 ? 0 : 7;
    require((own - whole.narrow(0, begin, own.size(0))).abs().max().item<double>() < 0.05,
            "output");
    loss_of(own).backward();
    require_same(net->buffers(), buffers_of(*alone), "buffer", 1e-2);
    const Tensor norm = alone->bn1->weight.grad();
    const double error = (net->bn1->weight.grad() - norm).abs().max().item<double>();
    require(error < 0.05 * norm.abs().max().item<double>(),
            format("gradient differs by {}", error));
  });
}

}  // namespace
}  // namespace cadre
