// Tests that errors about damaged or mismatching snapshots name the file or the tensor, are equal
// on all ranks, and are thrown before anything is changed.
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/snapshot_samples.h"
#include "cadre/testing/torch/wrap_net.h"
#include "cadre/train/checkpoint/file_digests.h"
#include "cadre/train/checkpoint/full_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using snapshot_test::Division;
using snapshot_test::make_parts;
using snapshot_test::World;
using ::testing::HasSubstr;

const World kTwo{Division::kFlat, 2};

class ShardedFailureTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
      SnapshotFolder folder(run_.path());
      save_sharded(folder, 1, make_parts(kTwo, group.rank(), true), group);
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    snapshot_ = SnapshotFolder(run_.path()).path_of(1);
    for (const auto& entry : fs::directory_iterator(snapshot_)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with("shard-00002-optimizer-00001")) shard_ = name;
    }
    ASSERT_NE(shard_, "");
  }

  // Loads the snapshot and returns the error, which must be equal on both ranks. Checks that the
  // load has changed no tensor.
  std::string load_error(const std::function<void(SnapshotParts&)>& change = {},
                         const LoadOptions& options = {}) {
    const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      SnapshotParts parts = make_parts(kTwo, group.rank(), /*is_filled=*/false);
      if (change) change(parts);
      try {
        load_sharded(snapshot_, parts, group, options);
        output = "loaded";
      } catch (const Error& error) {
        output = cadre::format("{}: {}", to_string(error.code()), error.message());
      }
      if (output == "loaded") return;
      for (const SnapshotTensor& tensor : parts.parameters) {
        if (tensor.values.numel() > 0 && tensor.values.ne(0).any().item<bool>()) {
          throw std::runtime_error(tensor.name + " has changed");
        }
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
    return result.ranks[0].output;
  }

  std::string file(const std::string& name) const { return snapshot_ + "/" + name; }

  void rewrite(const std::string& name, const std::function<void(std::string&)>& change) {
    std::string content = os::read_file(file(name), size_t{1} << 30).value_or_throw();
    change(content);
    std::ofstream(file(name), std::ios::binary) << content;
  }

  // Replaces a text in the manifest, and corrects the manifest's digest in B2SUMS.
  void rewrite_manifest(std::string_view from, std::string_view to) {
    rewrite("manifest.json", [&](std::string& text) {
      const size_t at = text.find(from);
      ASSERT_NE(at, std::string::npos);
      text.replace(at, from.size(), to);
    });
    rewrite("B2SUMS", [&](std::string& text) {
      const size_t line = text.rfind('\n', text.size() - 2) + 1;
      text.replace(line, 128, *digest_of(file("manifest.json")));
    });
  }

  std::string shard_;  // the name of one of the snapshot's files
  testing::TemporaryFolder run_;
  std::string snapshot_;
};

TEST_F(ShardedFailureTest, AFlippedByteOfAnyFileIsFound) {
  ASSERT_EQ(load_error(), "loaded");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(snapshot_)) {
    names.push_back(entry.path().filename().string());
  }
  ASSERT_GT(names.size(), 5u);
  for (const std::string& name : names) {
    // The file is small, so its middle byte belongs to the header, and its last byte to the values.
    for (const bool is_last : {false, true}) {
      const auto flip = [is_last](std::string& content) {
        (is_last ? content.back() : content[content.size() / 2]) ^= 1;
      };
      rewrite(name, flip);
      EXPECT_THAT(load_error(), HasSubstr("kCorruption")) << name;
      rewrite(name, flip);
    }
  }
  EXPECT_EQ(load_error(), "loaded");
}

TEST_F(ShardedFailureTest, RanksThatReadOtherSnapshotsAllSaySo) {
  const testing::TemporaryFolder other;
  const auto saved = testing::run_groups(2, [&](const ProcessGroup& group) {
    SnapshotFolder folder(other.path());
    save_sharded(folder, 2, make_parts(kTwo, group.rank(), true), group);
  });
  ASSERT_TRUE(saved.ok()) << saved.failures();
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    const SnapshotParts parts = make_parts(kTwo, group.rank(), /*is_filled=*/false);
    const std::string path =
        group.rank() == 0 ? snapshot_ : SnapshotFolder(other.path()).path_of(2);
    EXPECT_EQ(
        testing::error_of([&] { load_sharded(path, parts, group); }, ErrorCode::kInvalidArgument),
        cadre::format("load {}: rank 1 reads another snapshot than rank 0", path));
    EXPECT_TRUE(parts.parameters[0].values.eq(0).all().item<bool>());
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// B2SUMS and the manifest are equal on both ranks, but one rank's copy of a file is damaged, as if
// each machine had its own disk. Every rank reads every file.
TEST_F(ShardedFailureTest, DamageToTheCopyThatOneRankReadsIsFound) {
  const World whole{Division::kReplicated, 2};
  for (const auto& entry : fs::directory_iterator(snapshot_)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("shard-")) continue;
    const testing::TemporaryFolder place;
    const std::string copy = place.file("copy");
    fs::copy(snapshot_, copy, fs::copy_options::recursive);
    std::fstream stream(copy + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);  // a byte of the tensors' values
    stream.put('\x7f');
    stream.close();
    const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
      const SnapshotParts parts = make_parts(whole, group.rank(), /*is_filled=*/false);
      output = testing::failure_of(
          [&] { load_sharded(group.rank() == 0 ? snapshot_ : copy, parts, group); });
      EXPECT_TRUE(parts.parameters[0].values.eq(0).all().item<bool>());
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_EQ(rank.output,
                cadre::format("kCorruption: rank 1: {}/{}: its bytes do not match its digest in "
                              "B2SUMS: one of the two files is damaged, or of another snapshot",
                              copy, name));
    }
  }
}

// Two runs of one program write equal manifests. The ranks must notice that the values of the two
// snapshots differ.
TEST(ShardedLoad, SnapshotsThatDifferInTheirValuesOnlyAreTwo) {
  const testing::TemporaryFolder run;
  const World whole{Division::kReplicated, 2};
  std::vector<std::string> paths;
  std::vector<std::string> files;
  for (const double value : {1.0, 2.0}) {
    SnapshotFolder folder(run.file(std::to_string(value)));
    SnapshotParts parts = make_parts(whole, 0, /*is_filled=*/true);
    {
      const at::NoGradGuard no_grad;
      parts.parameters[0].values.fill_(value);
    }
    parts.optimizer.clear();
    save_sharded(folder, 1, parts);
    paths.push_back(folder.path_of(1));
    files.push_back(run.file(std::to_string(value) + ".safetensors"));
    write_full_state(paths.back(), files.back());
  }
  for (const std::vector<std::string>& of_ranks : {paths, files}) {
    const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
      const SnapshotParts parts = make_parts(whole, group.rank(), /*is_filled=*/false);
      const std::string& path = of_ranks[static_cast<size_t>(group.rank())];
      EXPECT_EQ(
          testing::error_of([&] { load_sharded(path, parts, group); }, ErrorCode::kInvalidArgument),
          cadre::format("load {}: rank 1 reads another snapshot than rank 0", path));
      EXPECT_TRUE(parts.parameters[0].values.eq(0).all().item<bool>());
      load_sharded(of_ranks[0], parts, group);
      EXPECT_TRUE(parts.parameters[0].values.eq(1).all().item<bool>());
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST_F(ShardedFailureTest, AMissingOrShortFileIsNamed) {
  const std::string content = *os::read_file(file(shard_), size_t{1} << 30);
  fs::remove(file(shard_));
  for (const bool with_digests : {true, false}) {
    EXPECT_THAT(
        load_error({}, {.with_digests = with_digests}),
        ::testing::AllOf(HasSubstr("kCorruption: rank"), HasSubstr(shard_ + " is missing")));
  }
  std::ofstream(file(shard_), std::ios::binary) << content.substr(0, content.size() - 1);
  EXPECT_THAT(load_error({}, {.with_digests = false}),
              HasSubstr(cadre::format("it has {} bytes; the manifest says {}", content.size() - 1,
                                      content.size())));
  std::ofstream(file(shard_), std::ios::binary) << content;
  fs::remove(file("manifest.json"));
  EXPECT_THAT(load_error(), HasSubstr("is no sharded snapshot: it has no manifest.json"));
}

TEST_F(ShardedFailureTest, AManifestThatContradictsTheFilesIsFound) {
  // The tensor has 13 elements: 7 in the file of rank 0 and 6 in that of rank 1. The changed
  // manifest says 6 and 7.
  rewrite_manifest(R"("offsets":[0],"sizes":[7])", R"("offsets":[0],"sizes":[6])");
  rewrite_manifest(R"("offsets":[7],"sizes":[6])", R"("offsets":[6],"sizes":[7])");
  EXPECT_THAT(load_error(), ::testing::AllOf(HasSubstr("kCorruption: rank 0"),
                                             HasSubstr("'norm' is BF16 (7); the manifest says BF16 "
                                                       "(6)")));
}

TEST_F(ShardedFailureTest, AManifestOfAnotherVersionIsRefused) {
  rewrite_manifest(R"("version":1)", R"("version":2)");
  EXPECT_THAT(load_error(), HasSubstr("kInvalidArgument: rank 0: " + snapshot_ +
                                      "/manifest.json: it has version 2"));
}

TEST_F(ShardedFailureTest, AManifestThatLeavesItsFolderIsRefused) {
  rewrite_manifest("shard-00001-model", "../00001/a-model");
  EXPECT_THAT(load_error(), HasSubstr("not the plain name"));
}

TEST_F(ShardedFailureTest, TheFirstTensorThatDoesNotFitIsNamed) {
  EXPECT_THAT(
      load_error([](SnapshotParts& parts) { parts.parameters.erase(parts.parameters.begin()); }),
      HasSubstr("has a tensor 'fc.weight', which the model does not (1 of 11 is unexpected)"));
  EXPECT_THAT(
      load_error([](SnapshotParts& parts) {
        parts.buffers.push_back(whole_tensor("more", torch::zeros({2})));
      }),
      ::testing::AllOf(HasSubstr("has no tensor 'more', which the model needs (1 is missing)"),
                       ::testing::Not(HasSubstr("another model"))));
  EXPECT_THAT(load_error([](SnapshotParts& parts) {
                for (auto* tensors : {&parts.parameters, &parts.buffers}) {
                  for (SnapshotTensor& tensor : *tensors) tensor.name = "mlp." + tensor.name;
                }
              }),
              HasSubstr("(11 are missing); its 11 tensors have other names, such as 'conv', so "
                        "another model has saved it"));
  EXPECT_THAT(load_error([](SnapshotParts& parts) {
                parts.buffers[1] = whole_tensor("mask", torch::zeros({2, 3}, at::kBool));
              }),
              HasSubstr("has tensor 'mask' as BOOL (3, 2), but the model has BOOL (2, 3)"));
  EXPECT_THAT(load_error([](SnapshotParts& parts) {
                parts.buffers[0] = whole_tensor("count", torch::zeros({}, at::kInt));
              }),
              HasSubstr("has tensor 'count' as I64 (), but the model has I32 ()"));
}

TEST_F(ShardedFailureTest, AFolderThatIsNoShardedSnapshotIsNamed) {
  const auto error_of = [](const std::string& path) -> std::string {
    try {
      load_sharded(path, SnapshotParts());
    } catch (const Error& error) {
      return error.message();
    }
    return "none";
  };
  const std::string run = fs::path(snapshot_).parent_path().string();
  EXPECT_EQ(error_of(run), run +
                               " is no sharded snapshot: it is the folder of a run; load one of "
                               "its snapshots, for example " +
                               snapshot_);
  EXPECT_EQ(error_of(run + "/none"),
            run + "/none is no sharded snapshot: there is no such file or folder");
  const testing::TemporaryFolder other;
  EXPECT_EQ(error_of(other.path().string()),
            other.path().string() + " is no sharded snapshot: it has no manifest.json");
  std::ofstream(other.file("model.safetensors")) << "x";
  EXPECT_EQ(error_of(other.path().string()),
            other.path().string() +
                " is no sharded snapshot: it is a snapshot of the trainer, whose tensors "
                "are whole and not sharded; load the file " +
                other.path().string() +
                "/model.safetensors, which has the parameters without the optimizer's state");
}

// The other rank must not wait for the failed rank in the gather of the parameters; it gets the
// same error instead.
TEST(ShardedLoad, AnErrorOfLibtorchOnOneRankIsThatOfAll) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const DeviceMesh mesh(group, {{"shard", 2}});
    const auto flat = std::make_shared<shard::FlatParameters>(
        std::vector<NamedTensor>{{"w", torch::ones({64}).requires_grad_()}}, group,
        shard::FlatParametersOptions{.keep_full = true});
    SnapshotParts parts;
    parts.parameters = {part_of(flat->parameter_shards(mesh, "shard").at(0))};
    parts.buffers = {whole_tensor("b", torch::ones({3}))};
    SnapshotFolder folder(run.path());
    save_sharded(folder, 1, parts, group);
    if (group.rank() == 1) {
      const c10::InferenceMode inference;
      parts.buffers[0].values = torch::ones({3});
    }
    output = testing::failure_of([&] { load_sharded(folder.path_of(1), parts, group); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, ::testing::StartsWith("kInvalidArgument: rank 1: "));
    EXPECT_THAT(rank.output, HasSubstr("nference"));
  }
}

}  // namespace
}  // namespace cadre
