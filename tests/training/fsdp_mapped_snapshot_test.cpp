// Tests that a sharded snapshot of a model with mapped or gathered shards can be loaded into either
// form, and that training then continues with the bits of an uninterrupted run.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr int64_t kSnapshotSide = 64;

using SnapshotUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

struct SnapshotNet : torch::nn::Module {
  SnapshotNet() {
    first = register_module("first", SnapshotUnit(kSnapshotSide, kSnapshotSide));
    head = register_module("head", torch::nn::Linear(kSnapshotSide, 3));
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : parameters()) {
      parameter.copy_(torch::sin(torch::arange(parameter.numel())).view(parameter.sizes()) / 8);
    }
  }
  Tensor forward(const Tensor& x) { return head(torch::tanh(first->forward(x))); }
  SnapshotUnit first{nullptr};
  torch::nn::Linear head{nullptr};
};

struct SnapshotRank {
  SnapshotRank(const ProcessGroup& of, ShardForm form)
      : group(of),
        model(net, group, {.form = form, .wrap_policy = wrap_shard_units()}),
        optimizer(model, torch::optim::AdamWOptions(0.01)) {
    require(model.form() == form, "the wrapper has another form of shards");
  }

  std::vector<double> train(int begin, int end) {
    std::vector<double> losses;
    for (int step = begin; step < end; ++step) {
      optimizer.zero_grad();
      const Tensor x = torch::cos(torch::arange(4 * kSnapshotSide) + step + 10 * group.rank());
      const Tensor loss = model(x.view({4, kSnapshotSide})).pow(2).mean();
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }

  void save(const std::string& run, int64_t step) {
    SnapshotFolder folder(run);
    SnapshotParts parts = parts_of(model.parameter_shards(), *net);
    parts.optimizer = state_dict(optimizer, parts.parameters);
    save_sharded(folder, step, parts, group, {.strategy = "fsdp"});
  }

  void load(const std::string& path) {
    const SnapshotParts parts = parts_of(model.parameter_shards(), *net);
    const LoadedSnapshot loaded = load_sharded(path, parts, group);
    load_state_dict(optimizer, parts.parameters, loaded.optimizer);
  }

  ProcessGroup group;
  std::shared_ptr<SnapshotNet> net = std::make_shared<SnapshotNet>();
  FullyShardedDataParallel<SnapshotNet> model;
  ShardedOptimizer<AdamW> optimizer;
};

TEST(FsdpMappedSnapshot, GoesOnWithTheBitsOfAnUninterruptedRun) {
  const testing::TemporaryFolder folder;
  const std::string run = folder.file("run");
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    SnapshotRank saved(group, ShardForm::kMapped);
    saved.train(0, 3);
    saved.save(run, 3);
    const std::vector<double> losses = saved.train(3, 8);
    const std::string path = *SnapshotFolder(run).latest();
    for (const ShardForm form : {ShardForm::kMapped, ShardForm::kGathered}) {
      SnapshotRank loaded(group, form);
      loaded.train(0, 1);
      loaded.load(path);
      require(loaded.train(3, 8) == losses, "the losses after the load have other bits");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpMappedSnapshot, LoadsOnAnotherNumberOfRanks) {
  const testing::TemporaryFolder folder;
  const std::string run = folder.file("run");
  std::vector<Tensor> expected;
  const auto whole_of = [](SnapshotRank& rank) {
    const auto full = rank.model.summon_full_params();
    std::vector<Tensor> values;
    for (const Tensor& parameter : rank.net->parameters()) {
      values.push_back(parameter.detach().clone());
    }
    return values;
  };
  const auto saving = run_groups(2, [&](const ProcessGroup& group) {
    SnapshotRank rank(group, ShardForm::kMapped);
    rank.train(0, 2);
    rank.save(run, 2);
    const auto values = whole_of(rank);
    if (group.rank() == 0) expected = values;
  });
  ASSERT_TRUE(saving.ok()) << saving.failures();
  const auto loading = run_groups(4, [&](const ProcessGroup& group) {
    SnapshotRank rank(group, ShardForm::kMapped);
    rank.load(*SnapshotFolder(run).latest());
    const auto values = whole_of(rank);
    for (size_t i = 0; i < expected.size(); ++i) {
      require(torch::equal(values[i], expected[i]), "the parameters have other bits");
    }
    rank.train(2, 4);
  });
  EXPECT_TRUE(loading.ok()) << loading.failures();
}

}  // namespace
}  // namespace cadre
