#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/testing/torch/snapshot_samples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/system.h"
#include "cadre/core/wire/snapshot_manifest.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/safetensors.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using snapshot_test::difference;
using snapshot_test::Division;
using snapshot_test::make_parts;
using snapshot_test::World;
using snapshot_test::worlds;
using testing::run_groups;

namespace fs = std::filesystem;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Saves one snapshot under each World (a division of the tensors and a number of ranks); World i
// saves step i.
void save_all(const std::string& run) {
  for (size_t i = 0; i < worlds().size(); ++i) {
    const World world = worlds()[i];
    const auto result = run_groups(world.size, [&](const ProcessGroup& group) {
      SnapshotFolder folder(run);
      SnapshotParts parts = make_parts(world, group.rank(), /*is_filled=*/true);
      parts.extra = R"({"epoch": 3})";
      save_sharded(folder, static_cast<int64_t>(i), parts, group, {.strategy = to_string(world)});
    });
    ASSERT_TRUE(result.ok()) << to_string(world) << "\n" << result.failures();
  }
}

SnapshotManifest manifest_of(const std::string& folder) {
  const std::string text =
      os::read_file(folder + "/manifest.json", kMaxSnapshotManifestBytes).value_or_throw();
  return parse_snapshot_manifest(text).value_or_throw();
}

TEST(ShardedSnapshot, EveryStrategyAndWorldLoadsWhatEveryOtherSaved) {
  const testing::TemporaryFolder run;
  save_all(run.path());
  for (const World& world : worlds()) {
    const auto result = run_groups(world.size, [&](const ProcessGroup& group) {
      const SnapshotParts expected = make_parts(world, group.rank(), /*is_filled=*/true);
      for (size_t i = 0; i < worlds().size(); ++i) {
        SnapshotParts parts = make_parts(world, group.rank(), /*is_filled=*/false);
        LoadedSnapshot loaded =
            load_sharded(SnapshotFolder(run.path()).path_of(static_cast<int64_t>(i)), parts, group);
        parts.optimizer = std::move(loaded.optimizer);
        const std::string different = difference(expected, parts);
        require(different.empty(), cadre::format("{} loads {}: {}", to_string(world),
                                                 to_string(worlds()[i]), different));
        require(loaded.step == static_cast<int64_t>(i), "the snapshot has another step");
        require(nlohmann::json::parse(loaded.extra) == nlohmann::json{{"epoch", 3}},
                "`extra` has another value");
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(ShardedSnapshot, OneProcessNeedsNoGroup) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  const World alone{Division::kReplicated, 1};
  const SnapshotParts saved = make_parts(alone, 0, /*is_filled=*/true);
  save_sharded(folder, 5, saved);
  SnapshotParts parts = make_parts(alone, 0, /*is_filled=*/false);
  parts.optimizer = load_sharded(*folder.latest(), parts).optimizer;
  EXPECT_EQ(difference(saved, parts), "");
}

void expect_shared_work(const World& world) {
  const testing::TemporaryFolder run;
  const auto result = run_groups(world.size, [&](const ProcessGroup& group) {
    SnapshotFolder folder(run.path());
    save_sharded(folder, 1, make_parts(world, group.rank(), true), group);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const std::string folder = SnapshotFolder(run.path()).path_of(1);
  std::map<std::string, int64_t> written;
  std::map<std::string, int64_t> bytes_by_rank;
  for (const ManifestFile& file : manifest_of(folder).files) {
    const SafetensorsFile opened = SafetensorsFile::open(folder + "/" + file.name);
    for (const auto& [name, tensor] : opened.read_all()) {
      written[name] += tensor.numel();
      bytes_by_rank[file.name.substr(0, 11)] += static_cast<int64_t>(tensor.nbytes());
    }
  }
  for (const auto& sample : snapshot_test::samples()) {
    const int64_t numel = c10::multiply_integers(sample.sizes);
    EXPECT_EQ(written[sample.name], numel) << sample.name;
    if (sample.has_state) {
      EXPECT_EQ(written["state." + sample.name + ".exp_avg"], numel);
    }
  }
  ASSERT_EQ(bytes_by_rank.size(), 4u);
  for (const auto& [rank, bytes] : bytes_by_rank) {
    EXPECT_GT(bytes, bytes_by_rank.begin()->second / 2) << rank;
  }
}

TEST(ShardedSnapshot, ReplicasWriteEachElementOnceAndShareTheWork) {
  expect_shared_work({Division::kHybrid, 4});
}

// The flat shards have different sizes on different ranks, as with tensor parallelism and sharded
// parameters. The replicas' boxes therefore overlap only in part.
TEST(ShardedSnapshot, ReplicasThatAreCutAtOtherPlacesDoSo) {
  expect_shared_work({Division::kUneven, 4});
}

// The statistics of a batch norm differ between ranks. The snapshot contains those of rank 0, the
// rank whose buffers DDP broadcasts.
TEST(ShardedSnapshot, BuffersAreThoseOfRank0) {
  const testing::TemporaryFolder run;
  const World world{Division::kFlat, 3};
  const auto result = run_groups(world.size, [&](const ProcessGroup& group) {
    SnapshotFolder folder(run.path());
    SnapshotParts parts = make_parts(world, group.rank(), true);
    for (const SnapshotTensor& buffer : parts.buffers) buffer.values.fill_(group.rank() == 0);
    save_sharded(folder, 1, parts, group);
    for (const SnapshotTensor& buffer : parts.buffers) buffer.values.zero_();
    load_sharded(folder.path_of(1), parts, group);
    for (const SnapshotTensor& buffer : parts.buffers) {
      testing::require(buffer.values.eq(1).all().item<bool>(), buffer.name);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Computes each tensor's boxes as torch.distributed.checkpoint does: from the offsets in the
// metadata and the sizes in the tensor entries.
TEST(ShardedSnapshot, FilesFollowTheConventionOfTorchDistributedCheckpoint) {
  const testing::TemporaryFolder run;
  const World world{Division::kFlat, 3};
  const auto result = run_groups(world.size, [&](const ProcessGroup& group) {
    SnapshotFolder folder(run.path());
    save_sharded(folder, 1, make_parts(world, group.rank(), true), group);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const fs::path folder = SnapshotFolder(run.path()).path_of(1);
  size_t num_boxes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    EXPECT_THAT(entry.path().filename().string(),
                ::testing::MatchesRegex(
                    "shard-0000[123]-(model|optimizer)-0000[1-7]-of-0000[1-7].safetensors"));
    const SafetensorsFile file = SafetensorsFile::open(entry.path());
    EXPECT_EQ(file.metadata().at("format"), "pt");
    EXPECT_EQ(file.metadata().at("DCP_VERSION"), "1.0");
    const auto info = nlohmann::json::parse(file.metadata().at("DCP_SHARDING_INFO"));
    for (const auto& [name, tensor] : file.read_all()) {
      const auto offsets = info.at(name).at("saved_offsets").get<std::vector<int64_t>>();
      if (name != "fc.weight") continue;
      at::Tensor expected =
          snapshot_test::values_of("fc.weight", snapshot_test::samples()[0], {Box{{0, 0}, {7, 5}}});
      for (size_t dim = 0; dim < offsets.size(); ++dim) {
        const auto at = static_cast<int64_t>(dim);
        expected = expected.narrow(at, offsets[dim], tensor.size(at));
      }
      EXPECT_TRUE(tensor.equal(expected));
      ++num_boxes;
    }
  }
  EXPECT_GT(num_boxes, 3u);  // a shard that begins within a row consists of several boxes
}

TEST(ShardedSnapshot, TiedParametersAreSavedOnceAndLoadUnderEveryName) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() : first(torch::nn::LinearOptions(3, 3).bias(false)) {
      register_module("first", first);
      tied = register_parameter("tied", first->weight);
    }
    torch::nn::Linear first;
    at::Tensor tied;
  };
  const testing::TemporaryFolder run;
  TiedImpl net;
  SnapshotParts parts = parts_of(net);
  ASSERT_EQ(parts.parameters.size(), 1u);
  SnapshotFolder folder(run.path());
  save_sharded(folder, 1, parts);
  TiedImpl other;
  load_sharded(*folder.latest(), parts_of(other));
  EXPECT_TRUE(other.tied.equal(net.tied));
  const std::string file = run.file("net.safetensors");
  write_full_state(*folder.latest(), file);
  TiedImpl third;
  load(third, file);
  EXPECT_TRUE(third.first->weight.equal(net.tied));
}

// The load throws before any parameter is changed.
TEST(ShardedSnapshot, ABufferWhoseElementsShareMemoryIsRefused) {
  const testing::TemporaryFolder run;
  SnapshotParts parts;
  parts.parameters = {whole_tensor("a", torch::ones({2}))};
  parts.buffers = {whole_tensor("b", torch::ones({4, 3}))};
  SnapshotFolder folder(run.path());
  save_sharded(folder, 1, parts);
  parts.parameters[0].values = torch::zeros({2});
  parts.buffers[0].values = torch::zeros({3}).expand({4, 3});
  EXPECT_THAT(testing::failure_of([&] { load_sharded(*folder.latest(), parts); }),
              ::testing::HasSubstr("kInvalidArgument: elements of 'b' share memory"));
  EXPECT_EQ(parts.parameters[0].values.sum().item<float>(), 0);
}

// A wrapper may leave some parameters unsharded, for example frozen or ignored ones.
TEST(ShardedSnapshot, ParametersInNoShardAreSavedWhole) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"shard", 2}});
    torch::nn::Linear net(3, 2);
    const FlatRange range = group.rank() == 0 ? FlatRange{0, 4} : FlatRange{4, 6};
    const ParameterShard shard = {.name = "weight",
                                  .sizes = {2, 3},
                                  .mesh = mesh,
                                  .placements = {Replicate()},
                                  .flat_axis = "shard",
                                  .range = range,
                                  .values = torch::zeros({range.size()}),
                                  .parameter = net->weight};
    const SnapshotParts parts = parts_of({&shard, 1}, *net);
    ASSERT_EQ(parts.parameters.size(), 2u);
    EXPECT_EQ(parts.parameters[0].name, "weight");
    EXPECT_EQ(parts.parameters[1].name, "bias");
    EXPECT_EQ(parts.parameters[1].values.data_ptr(), net->bias.data_ptr());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedSnapshot, PythonReadsEveryFile) {
  const testing::TemporaryFolder run;
  const World world{Division::kFlat, 3};
  const auto result = run_groups(world.size, [&](const ProcessGroup& group) {
    SnapshotFolder folder(run.path());
    save_sharded(folder, 1, make_parts(world, group.rank(), true), group);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const auto system = os::make_native_system();
  const auto output =
      os::program_output({"python3", testing::source_path("tests/formats/sum_tensors.py"),
                          SnapshotFolder(run.path()).path_of(1)},
                         system->deadline_in(std::chrono::seconds(60)));
  ASSERT_TRUE(output.ok()) << output.error().message();
  const auto expect_line = [&](const std::string& name, const char* dtype, double sum) {
    EXPECT_THAT("\n" + *output, ::testing::HasSubstr(cadre::format("\n{} {} {}\n", name, dtype,
                                                                   static_cast<int64_t>(sum))));
  };
  for (const auto& sample : snapshot_test::samples()) {
    const auto sum = [&sample](const std::string& name) {
      double total = 0;
      for (int64_t i = 0; i < c10::multiply_integers(sample.sizes); ++i) {
        total += snapshot_test::value_at(name, i);
      }
      return total;
    };
    const std::string dtype(*safetensors_dtype(sample.dtype));
    expect_line(sample.name, dtype.c_str(), sum(sample.name));
    if (!sample.has_state) continue;
    expect_line(cadre::format("state.{}.exp_avg", sample.name), dtype.c_str(),
                sum(sample.name + "exp_avg"));
  }
  expect_line("count", "I64", 77);
  expect_line("mask", "BOOL", 3);
  expect_line("state.fc.bias.step", "I64", 1001);
}

}  // namespace
}  // namespace cadre
