// Tests load_sharded() into the shards of a wrapper or of a ZeRO optimizer. After the load, every
// rank must compute with the values of the snapshot, without another call.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr int kRanks = 3;

struct Small : torch::nn::Module {
  explicit Small(double value) {
    first = register_module("first", torch::nn::Linear(5, 7));
    last = register_module("last", torch::nn::Linear(7, 3));
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : parameters()) {
      parameter.copy_(torch::arange(parameter.numel(), torch::kDouble).view(parameter.sizes()) +
                      value);
    }
  }
  Tensor forward(const Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};

// A snapshot that one process has saved, with other values than the initial values of the ranks.
struct SavedRun {
  SavedRun() {
    SnapshotFolder run(folder.path());
    save_sharded(run, 1, parts_of(saved));
    path = run.path_of(1);
  }
  testing::TemporaryFolder folder;
  Small saved{0.25};
  std::string path;
};

void require_loaded(const Small& net, const Small& saved) {
  for (const auto& item : saved.named_parameters()) {
    require(torch::equal(net.named_parameters()[item.key()], item.value()),
            "other values than the snapshot's: " + item.key());
  }
}

Tensor input() {
  return torch::linspace(-1, 1, 10, torch::kDouble).view({2, 5});
}

void on_ranks(const std::function<void(const ProcessGroup&)>& body) {
  const auto result = run_groups(kRanks, body);
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LoadIntoWrappers, ADividedOptimizerOfWholeGradients) {
  const SavedRun run;
  for (const bool waits : {true, false}) {
    on_ranks([&](const ProcessGroup& group) {
      const auto net = std::make_shared<Small>(-3);
      DistributedDataParallel model{net, group};
      ZeroRedundancyOptimizer<AdamW> optimizer{
          model, torch::optim::AdamWOptions(0.1), {.wait_in_step = waits}};
      for (int round = 0; round < 2; ++round) {
        load_sharded(run.path, parts_of(optimizer.parameter_shards(), *net), group);
        require_loaded(*net, run.saved);
        model(input()).sum().backward();
        optimizer.step();
        optimizer.wait();
        require(!torch::equal(net->first->weight, run.saved.first->weight),
                "the step has not changed the weight");
      }
    });
  }
}

TEST(LoadIntoWrappers, AModelOfShardedGradients) {
  const SavedRun run;
  on_ranks([&](const ProcessGroup& group) {
    const auto net = std::make_shared<Small>(-3);
    DistributedDataParallel model{net, group, {.gradients = GradientPlacement::kSharded}};
    ZeroRedundancyOptimizer<AdamW> optimizer{model, torch::optim::AdamWOptions(0.1)};
    for (int round = 0; round < 2; ++round) {
      model(input()).sum().backward();
      optimizer.step();
      load_sharded(run.path, parts_of(model.parameter_shards(), *net), group);
      require_loaded(*net, run.saved);
    }
  });
}

// Also tests units that stay gathered between two forwards.
TEST(LoadIntoWrappers, AFullyShardedModel) {
  const SavedRun run;
  Small plain(0.25);
  const Tensor expected = plain.forward(input());
  for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kAfterReduction}) {
    on_ranks([&](const ProcessGroup& group) {
      const auto net = std::make_shared<Small>(-3);
      FullyShardedDataParallel model{net, group, {.reshard_root = reshard}};
      const torch::NoGradGuard no_grad;
      model(input());
      {
        const at::AutoGradMode with_grad(true);
        const auto no_sync = model.no_sync();
        model(input()).sum().backward();  // afterwards the parameters stay gathered
      }
      load_sharded(run.path, parts_of(model.parameter_shards(), *net), group);
      require(torch::allclose(model(input()), expected, 1e-12, 1e-12),
              "the model does not use the loaded values");
    });
  }
}

// Trains a parameter that was frozen before: as the wrapper's error recommends, the test constructs
// the module again and loads the snapshot of the first run.
TEST(LoadIntoWrappers, AParameterThatIsTrainedFromNowOn) {
  const testing::TemporaryFolder folder;
  on_ranks([&](const ProcessGroup& group) {
    const auto plain = std::make_shared<Small>(0.25);
    plain->first->weight.requires_grad_(false);
    torch::optim::SGD plain_before(plain->parameters(), 0.1);
    SnapshotFolder run(folder.path());
    {
      const auto net = std::make_shared<Small>(0.25);
      net->first->weight.requires_grad_(false);
      FullyShardedDataParallel model{net, group};
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      model(input()).sum().backward();
      plain->forward(input()).sum().backward();
      optimizer.step();
      plain_before.step();
      save_sharded(run, 1, parts_of(model.parameter_shards(), *net), group);
    }
    const auto net = std::make_shared<Small>(-3);
    FullyShardedDataParallel model{net, group};
    load_sharded(run.path_of(1), parts_of(model.parameter_shards(), *net), group);
    plain->first->weight.requires_grad_(true);
    plain->zero_grad();
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD plain_after(plain->parameters(), 0.1);
    model(input()).sum().backward();
    plain->forward(input()).sum().backward();
    optimizer.step();
    plain_after.step();
    const torch::NoGradGuard no_grad;
    require(torch::allclose(model(input()), plain->forward(input()), 1e-12, 1e-12),
            "the parameter was not trained as in one process");
  });
}

// The load overwrites values that the forward has saved for the backward, so autograd throws, as it
// does after an optimizer step.
TEST(LoadIntoWrappers, ABackwardThroughAForwardBeforeTheLoadIsRefused) {
  const SavedRun run;
  on_ranks([&](const ProcessGroup& group) {
    const auto net = std::make_shared<Small>(-3);
    DistributedDataParallel model{net, group, {.gradients = GradientPlacement::kSharded}};
    const Tensor loss = model(input()).sum();
    load_sharded(run.path, parts_of(model.parameter_shards(), *net), group);
    EXPECT_THROW(loss.backward(), c10::Error);
  });
}

}  // namespace
}  // namespace cadre
