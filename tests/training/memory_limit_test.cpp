// Tests a model that is too large for training by one process in a memory cgroup. It can be trained
// if its parameters, gradients and optimizer state are divided among four ranks, each in a cgroup
// of that size, or if they are kept in files. With files this even works if the parameters alone
// are larger than the cgroup.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/tensor/group/beside.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/optim/offloaded_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/memory_cgroup.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using testing::MemoryCgroup;
using testing::RankContext;
using testing::require;
using torch::Tensor;

constexpr int kNumLayers = 12;
constexpr int64_t kLayerWidth = 2048;  // 12 layers of 16.8 MB: 201 MB
constexpr int64_t kBatchRows = 8;
constexpr int kLimitedSteps = 3;
// Parameters, gradients and two states take 806 MB together, so each of four ranks has 201 MB of
// them. A rank additionally holds the whole module at first, and later two full units and their
// gradients.
constexpr size_t kLimitBytes = size_t{384} << 20;
// Less than the parameters take. It must suffice for two full units, their gradients, the buffers
// of reductions, and the process itself.
constexpr size_t kSmallLimitBytes = size_t{176} << 20;

using WideLayer = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

struct WideMlp : torch::nn::Module {
  // If `files` is not null, the values of the parameters are kept in these files instead of in
  // memory.
  explicit WideMlp(FileMemory* files = nullptr) {
    torch::manual_seed(7);
    for (int i = 0; i < kNumLayers; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i),
                          WideLayer(torch::nn::LinearOptions(kLayerWidth, kLayerWidth))));
      if (files == nullptr) continue;
      for (Tensor& parameter : layers.back()->parameters()) {
        parameter.set_data(moved_beside(files->zeros(1, torch::kFloat), parameter.detach()));
      }
    }
  }
  Tensor forward(Tensor x) {
    for (WideLayer& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<WideLayer> layers;
};

Tensor wide_rows_of(int rank, int world_size) {
  const Tensor rows =
      torch::sin(torch::arange(kBatchRows * kLayerWidth, torch::kFloat)).view({kBatchRows, -1});
  return rows.narrow(0, kBatchRows / world_size * rank, kBatchRows / world_size);
}

// Trains and returns the losses of this rank as a text.
template <typename Model>
std::string train_wide(Model& model, std::vector<Tensor> parameters, const Tensor& rows) {
  AdamW optimizer(std::move(parameters), torch::optim::AdamWOptions(1e-5));
  std::ostringstream losses;
  losses.precision(9);
  for (int step = 0; step < kLimitedSteps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = model.forward(rows).pow(2).mean();
    loss.backward();
    optimizer.step();
    losses << loss.template item<float>() << " ";
  }
  return losses.str();
}

// Trains in one process, without a wrapper.
testing::RanksResult train_plainly(const MemoryCgroup* cgroup) {
  testing::JobOptions job{.world_size = 1};
  job.processes.time_limit = std::chrono::seconds(120);
  return testing::run_job(job, [&](RankContext& context, const Membership&) {
    if (cgroup != nullptr) cgroup->enter();
    at::set_num_threads(1);
    WideMlp model;
    context.output = train_wide(model, model.parameters(), wide_rows_of(0, 1));
  });
}

struct LimitedRun {
  std::optional<FileOffload> offload = {};
  bool is_made_in_files = false;
};

// Trains on ranks that each run in a cgroup of their own.
testing::RanksResult train_limited(const std::vector<std::unique_ptr<MemoryCgroup>>& cgroups,
                                   const LimitedRun& run) {
  testing::JobOptions job{.world_size = static_cast<int>(cgroups.size())};
  job.processes.time_limit = std::chrono::seconds(120);
  return testing::run_job(job, [&](RankContext& context, const Membership& membership) {
    cgroups[static_cast<size_t>(context.rank.value)]->enter();
    at::set_num_threads(1);
    // This setting makes glibc return the memory of freed tensors that lie between small
    // allocations.
    ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
    const ProcessGroup group(
        testing::connect(context, membership, {.timeout = std::chrono::seconds(60)}));
    const auto files = run.is_made_in_files ? FileMemory::open(run.offload->folder) : nullptr;
    FullyShardedDataParallel model{
        std::make_shared<WideMlp>(files.get()), group,
        FullyShardedDataParallelOptions{.offload = run.offload, .wrap_policy = wrap_shard_units()}};
    context.output = train_wide(model, model.parameters(),
                                wide_rows_of(context.rank.value, membership.world_size));
    group.close();
  });
}

std::vector<std::unique_ptr<MemoryCgroup>> make_cgroups(int count, size_t num_bytes) {
  std::vector<std::unique_ptr<MemoryCgroup>> cgroups;
  for (int i = 0; i < count; ++i) {
    cgroups.push_back(std::make_unique<MemoryCgroup>(std::to_string(i), num_bytes));
  }
  return cgroups;
}

double mean_of_last_losses(const testing::RanksResult& result) {
  double sum = 0;
  for (const auto& rank : result.ranks) {
    std::istringstream losses(rank.output);
    double loss = 0;
    for (int step = 0; step < kLimitedSteps; ++step) losses >> loss;
    sum += loss;
  }
  return sum / static_cast<double>(result.ranks.size());
}

// Checks the size of a rank's files: they must contain only its shards, their gradients, and two
// tensors of state for each parameter of which it owns elements, all in whole pages.
template <typename O>
void expect_state_in_files(int world_size) {
  const testing::TemporaryFolder folder;
  const auto train = [&](RankContext& context, const Membership& membership) {
    at::set_num_threads(1);
    const ProcessGroup group(testing::connect(context, membership, {}));
    torch::nn::Sequential module;
    for (int i = 0; i < 3; ++i) module->push_back(WideLayer(torch::nn::LinearOptions(40, 40)));
    FullyShardedDataParallel model{
        module, group,
        FullyShardedDataParallelOptions{.offload = FileOffload{.folder = folder.path()},
                                        .wrap_policy = wrap_shard_units()}};
    const auto in_pages = [](int64_t numel) { return FileMemory::in_pages(numel * 4); };
    const int64_t alignment = shard::FlatParametersOptions().alignment;
    const shard::FlatLayout layout({40 * 40, 40}, world_size,
                                   {.of_shards = alignment, .of_tensors = alignment});
    int64_t num_bytes = 3 * 2 * in_pages(layout.shard_numel());
    require(model.file_bytes() == num_bytes, format("{} after construction", model.file_bytes()));
    O optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
    for (const Tensor& values : model.parameters()) num_bytes += 2 * in_pages(values.numel());
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model(torch::ones({2, 40})).pow(2).mean().backward();
      optimizer.step();
      require(model.file_bytes() == num_bytes, format("{} after a step", model.file_bytes()));
    }
    group.close();
  };
  const auto result = testing::run_job({.world_size = world_size}, train);
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(OffloadedBytes, AreThoseOfTheFormulaWithTheStateOfAnyOptimizer) {
  for (const int world_size : {1, 2}) {
    expect_state_in_files<AdamW>(world_size);
    expect_state_in_files<OffloadedOptimizer<torch::optim::AdamW>>(world_size);
  }
}

// Returns the result of one process without a memory limit. It is computed once for all tests.
const testing::RanksResult& unlimited() {
  static const testing::RanksResult result = train_plainly(nullptr);
  return result;
}

class MemoryLimit : public ::testing::Test {
 protected:
  void SetUp() override {
    const MemoryCgroup tried("tried", kLimitBytes);
    if (!tried.is_there()) GTEST_SKIP() << tried.reason();
    ASSERT_TRUE(unlimited().ok()) << unlimited().failures();
  }
};

TEST_F(MemoryLimit, AModelThatOneProcessCannotTrainTrainsInShardsAndInFiles) {
  {
    const auto cgroups = make_cgroups(1, kLimitBytes);
    const auto alone = train_plainly(cgroups[0].get());
    EXPECT_EQ(alone.ranks[0].signal, SIGKILL) << alone.failures() << alone.ranks[0].output;
  }
  {
    const auto cgroups = make_cgroups(4, kLimitBytes);
    const auto sharded = train_limited(cgroups, {});
    EXPECT_TRUE(sharded.ok()) << sharded.failures();
    EXPECT_NEAR(mean_of_last_losses(sharded), mean_of_last_losses(unlimited()), 1e-5);
    for (const auto& cgroup : cgroups) RecordProperty("peak_of_4", cgroup->peak());
  }
  const testing::TemporaryFolder folder;
  const auto cgroups = make_cgroups(1, kLimitBytes);
  const auto in_files = train_limited(cgroups, {.offload = FileOffload{.folder = folder.path()}});
  EXPECT_TRUE(in_files.ok()) << in_files.failures();
  EXPECT_EQ(in_files.ranks[0].output, unlimited().ranks[0].output);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST_F(MemoryLimit, AModelOfLargerParametersThanMemoryTrainsInFiles) {
  const testing::TemporaryFolder folder;
  const auto cgroups = make_cgroups(1, kSmallLimitBytes);
  const auto in_files = train_limited(
      cgroups, {.offload = FileOffload{.folder = folder.path()}, .is_made_in_files = true});
  EXPECT_TRUE(in_files.ok()) << in_files.failures();
  EXPECT_EQ(in_files.ranks[0].output, unlimited().ranks[0].output);
}

}  // namespace
}  // namespace cadre
