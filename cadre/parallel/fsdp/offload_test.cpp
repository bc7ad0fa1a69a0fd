// Tests shards and gradients in files: training gives the same bits as in memory, the files have
// the expected sizes, and if the disk is full all ranks throw the same error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/tensor/group/file_memory.h"
#include "cadre/testing/core/small_disk.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

std::string bits_of_all(const std::vector<Training>& trainings) {
  std::string bits;
  for (const Training& training : trainings) {
    for (const Snapshot& gradients : training.gradients) bits += bits_of(gradients);
    bits += bits_of(training.parameters);
  }
  return bits;
}

struct OffloadMode {
  const char* name;
  const char* model;
  ShardPrecision precision = {};
  Reshard reshard = Reshard::kAfterForward;
};

class FsdpOffload : public ::testing::TestWithParam<OffloadMode> {};

TEST_P(FsdpOffload, HasTheBitsOfTheRunInMemory) {
  const Case test_case{GetParam().model, "adamw", 25, torch::kFloat};
  const auto batches = make_batches(test_case, 1);
  for (const int world_size : {1, 2, 4}) {
    SCOPED_TRACE(world_size);
    const TemporaryFolder folder;
    FullyShardedDataParallelOptions options = all_units(test_case, world_size);
    options.precision = GetParam().precision;
    options.reshard = GetParam().reshard;
    const auto in_memory = train_sharded(test_case, batches, 1, world_size, options);
    options.offload = {.folder = folder.path()};
    const auto in_files = train_sharded(test_case, batches, 1, world_size, options);
    EXPECT_TRUE(bits_of_all(in_files) == bits_of_all(in_memory));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, FsdpOffload,
    ::testing::Values(
        OffloadMode{"mlp", "mlp"}, OffloadMode{"gpt", "gpt"},
        OffloadMode{"bfloat16", "gpt", {.parameters = torch::kBFloat16, .reduce = torch::kFloat}},
        OffloadMode{"kept", "mlp", {}, Reshard::kAfterReduction}),
    [](const auto& mode) { return mode.param.name; });

// A training step with two backwards. reduces: whether the first of them reduces gradients.
struct OffloadSteps {
  bool reduces;
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    const auto pass = [&](const Tensor& part) { model.forward(part).pow(2).mean().backward(); };
    if (reduces) {
      pass(rows.sin());
    } else {
      const auto guard = model.no_sync();
      pass(rows.sin());
    }
    pass(rows);
  }
};

TEST(FsdpOffloadMechanics, AccumulatesInFiles) {
  for (const bool reduces : {true, false}) {
    for (const int world_size : {1, 3}) {
      const TemporaryFolder folder;
      const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
        const auto train = [&](std::optional<FileOffload> offload) {
          FullyShardedDataParallelOptions options = every_unit();
          options.offload = std::move(offload);
          FullyShardedDataParallel model{std::make_shared<Tower>(), group, options};
          return bits_of(train_wrapped(model, group, OffloadSteps{reduces}));
        };
        require(train(FileOffload{.folder = folder.path()}) == train(std::nullopt), "other bits");
      });
      EXPECT_TRUE(result.ok()) << result.failures();
    }
  }
}

TEST(FsdpOffloadMechanics, TrainsOnTwoAxes) {
  const TemporaryFolder folder;
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"replicate", 2}, {"shard", 2}});
    const auto train = [&](std::optional<FileOffload> offload) {
      FullyShardedDataParallelOptions options = every_unit();
      options.offload = std::move(offload);
      FullyShardedDataParallel model{std::make_shared<Tower>(), mesh, options};
      train_wrapped(model, group, PlainSteps{});
      return bits_of(copies_of(model.parameters()));
    };
    require(train(FileOffload{.folder = folder.path()}) == train(std::nullopt), "other bits");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// There are 4 units and the root; the shard of each takes one page, and so do its gradients.
// tests/training/memory_limit_test.cpp tests the size of the optimizer state.
TEST(FsdpOffloadMemory, IsThatOfShardsAndGradients) {
  for (const int world_size : {1, 2}) {
    const TemporaryFolder folder;
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      FullyShardedDataParallelOptions options = every_unit();
      options.offload = {.folder = folder.path()};
      FullyShardedDataParallel model{std::make_shared<Tower>(), group, options};
      const int64_t num_bytes = (4 + 1) * 2 * FileMemory::in_pages(1);
      EXPECT_EQ(model.file_bytes(), num_bytes);
      train_wrapped(model, group, PlainSteps{});
      for (const Tensor& values : model.parameters()) {
        if (values.numel() == 0) continue;
        EXPECT_NE(FileMemory::of(values), nullptr);
        EXPECT_NE(FileMemory::of(values.grad()), nullptr);
      }
      EXPECT_EQ(model.file_bytes(), num_bytes);
      EXPECT_EQ(model.full_bytes(), 0);
      EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "the file has a name";
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// The pages that are needed: 2 (shard and gradients) for each of 4 units and the root, and 2
// (AdamW's state) for each of 10 parameters. The disk has exactly this many pages, or one page
// less.
TEST(FsdpOffloadErrors, AFullDiskIsReportedAtConstruction) {
  constexpr size_t kNeeded = (5 * 2 + 10 * 2) * 4096;
  for (const auto& [num_bytes, is_enough] : {std::pair(kNeeded, true), {kNeeded - 4096, false}}) {
    const SmallDisk disk(num_bytes);
    if (!disk.is_there()) GTEST_SKIP() << "mounting a tmpfs needs CAP_SYS_ADMIN";
    const auto result = run_groups(1, [&, is_enough = is_enough](const ProcessGroup& group) {
      FullyShardedDataParallelOptions options = every_unit();
      options.offload = {.folder = disk.folder().path()};
      const auto module = std::make_shared<Tower>();
      const std::string failure = failure_of([&] {
        FullyShardedDataParallel{module, group, options};
      });
      if (is_enough) {
        EXPECT_EQ(failure, "");
        return;
      }
      EXPECT_THAT(failure, HasSubstr("kUnavailable: FullyShardedDataParallel, rank 0: "
                                     "options.offload: reserve 122880 bytes in folder"));
      EXPECT_THAT(failure, HasSubstr("No space left on device"));
      // The constructor has thrown before it sharded a parameter.
      EXPECT_EQ(module->forward(data_of(0)).numel(), kRows);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// The pages that a rank needs: 2 (shard and gradients) for each of five units, and 2 (AdamW's
// state) for each parameter of which it owns elements.
TEST(FsdpOffloadErrors, EachRankReservesForItsOwnParts) {
  const auto result = run_groups(8, [](const ProcessGroup& group, std::string& output) {
    size_t num_pages = 5 * 2;
    {
      FullyShardedDataParallel model{std::make_shared<Tower>(), group, every_unit()};
      for (const Tensor& values : model.parameters()) num_pages += values.numel() > 0 ? 2 : 0;
    }
    const SmallDisk disk(num_pages * 4096);
    output = disk.is_there() ? std::to_string(num_pages) : "";
    FullyShardedDataParallelOptions options = every_unit();
    if (disk.is_there()) options.offload = {.folder = disk.folder().path()};
    EXPECT_EQ(failure_of([&] {
                FullyShardedDataParallel{std::make_shared<Tower>(), group, options};
              }),
              "");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  if (result.ranks[0].output.empty()) GTEST_SKIP() << "mounting a tmpfs needs CAP_SYS_ADMIN";
  EXPECT_NE(result.ranks[0].output, result.ranks[7].output);
}

TEST(FsdpOffloadErrors, AllRanksReportTheFolderThatOneLacks) {
  const TemporaryFolder folder;
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallelOptions options = every_unit();
    options.offload = {.folder = group.rank() == 1 ? folder.file("none") : folder.path().string()};
    const std::string failure = failure_of([&] {
      FullyShardedDataParallel{std::make_shared<Tower>(), group, options};
    });
    EXPECT_THAT(failure, HasSubstr("kUnavailable: FullyShardedDataParallel"));
    EXPECT_THAT(failure, HasSubstr("rank 1: options.offload: make a scratch file in the folder"));
    EXPECT_THAT(failure, HasSubstr("none\", which must exist on a disk: No such file"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpOffloadErrors, MappedShardsAreInMemory) {
  const TemporaryFolder folder;
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallelOptions options = every_unit();
    options.offload = {.folder = folder.path()};
    options.form = ShardForm::kMapped;
    EXPECT_THAT(
        failure_of([&] {
          FullyShardedDataParallel{std::make_shared<Tower>(), group, options};
        }),
        HasSubstr("options.form is kMapped, and options.offload keeps shards in files, which "
                  "other ranks cannot read in place: choose ShardForm::kGathered, or leave "
                  "offload out"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpOffloadErrors, AllRanksOffloadOrNone) {
  const TemporaryFolder folder;
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallelOptions options = every_unit();
    if (group.rank() == 1) options.offload = {.folder = folder.path()};
    EXPECT_THAT(failure_of([&] {
                  FullyShardedDataParallel{std::make_shared<Tower>(), group, options};
                }),
                HasSubstr("options.offload is unset on rank 0 and set on rank 1"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
