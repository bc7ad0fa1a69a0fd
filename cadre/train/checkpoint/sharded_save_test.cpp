// Tests that the save throws on all ranks for parts that cannot be saved or could never be loaded.
// The error names the tensor, and the run folder stays empty.
#include "cadre/train/checkpoint/sharded_save.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <functional>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/snapshot_samples.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using snapshot_test::Division;
using snapshot_test::make_parts;
using snapshot_test::World;
using ::testing::HasSubstr;

const World kTwoRanks{Division::kFlat, 2};

// Calls `change` on the parts of one of two ranks, and returns the error of save_sharded(), which
// must be equal on both.
std::string save_error(const std::function<void(SnapshotParts&)>& change, int changed_rank) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    SnapshotFolder folder(run.path());
    SnapshotParts parts = make_parts(kTwoRanks, group.rank(), true);
    if (group.rank() == changed_rank) change(parts);
    output = testing::failure_of([&] { save_sharded(folder, 3, parts, group); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  EXPECT_TRUE(fs::is_empty(run.path()));
  return result.ranks[0].output;
}

TEST(ShardedSave, WhatTheRanksDoNotAgreeOnIsNamed) {
  EXPECT_EQ(
      save_error(
          [](SnapshotParts& parts) {
            parts.optimizer[0].scalars[0].tensor = torch::tensor(int64_t{7});
          },
          1),
      "kInvalidArgument: snapshot of step 3: 'state.fc.weight.step' has other values on rank 1 "
      "than on rank 0; a scalar of an optimizer's state must be equal on all ranks");
  EXPECT_EQ(save_error([](SnapshotParts& parts) { parts.parameters[1].sizes = {8}; }, 1),
            "kInvalidArgument: snapshot of step 3: 'fc.bias' is F32 (7) on rank 0, but F32 (8) on "
            "rank 1");
  EXPECT_EQ(
      save_error(
          [](SnapshotParts& parts) {
            parts.parameters.pop_back();
            parts.optimizer.pop_back();
          },
          1),
      "kInvalidArgument: snapshot of step 3: 'embed.weight' is a tensor of the model on rank "
      "0, but not on rank 1, which could not load the snapshot: all ranks need the same "
      "names of parameters and buffers; a rank that holds no elements of a parameter lists it "
      "without boxes");
  EXPECT_EQ(save_error(
                [](SnapshotParts& parts) {
                  parts.parameters.back().boxes.clear();
                  parts.parameters.back().values = torch::zeros({0});
                  parts.optimizer.pop_back();
                },
                1),
            "kInvalidArgument: snapshot of step 3: 'embed.weight': its pieces cover 256 of 512 "
            "elements; all ranks together must hold the whole tensor");
  EXPECT_EQ(
      save_error([](SnapshotParts& parts) { parts.parameters.back().boxes[0].offsets[0] -= 1; }, 1),
      "kInvalidArgument: snapshot of step 3: 'embed.weight': its pieces cover 504 of 512 elements; "
      "all ranks together must hold the whole tensor");
  EXPECT_EQ(save_error(
                [](SnapshotParts& parts) {
                  SnapshotTensor& tensor = parts.parameters.back();
                  tensor.boxes = {{{32, 0}, {20, 8}}, {{51, 0}, {12, 8}}};
                },
                1),
            "kInvalidArgument: snapshot of step 3: 'embed.weight': two of the boxes of rank 1 "
            "overlap; the boxes of a rank must not overlap");
}

// The same ranks could not load this snapshot, so the save throws.
TEST(ShardedSave, BuffersThatNotAllRanksHaveAreRefused) {
  const auto add = [](SnapshotParts& parts) {
    parts.buffers.push_back(whole_tensor("running_mean", torch::zeros({3})));
  };
  for (const int rank : {0, 1}) {
    EXPECT_THAT(save_error(add, rank),
                ::testing::StartsWith(cadre::format(
                    "kInvalidArgument: snapshot of step 3: 'running_mean' is a tensor of the model "
                    "on rank {}, but not on rank {}",
                    rank, 1 - rank)));
  }
  EXPECT_EQ(save_error(
                [](SnapshotParts& parts) {
                  parts.buffers[1] = whole_tensor("mask", torch::zeros({2, 3}, at::kBool));
                },
                1),
            "kInvalidArgument: snapshot of step 3: 'mask' is BOOL (3, 2) on rank 0, but BOOL (2, "
            "3) on rank 1");
  EXPECT_EQ(save_error([](SnapshotParts& parts) { parts.buffers[0].name = "fc.weight"; }, 1),
            "kInvalidArgument: snapshot of step 3: rank 1: 'fc.weight' occurs twice");
}

// Rank 1 passes another run folder than rank 0, so it does not find the folder of the new snapshot.
TEST(ShardedSave, ARunFolderThatIsNotThatOfRank0IsNamed) {
  const testing::TemporaryFolder run;
  const std::string root = run.path().string();
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    SnapshotFolder folder(cadre::format("{}/of-{}", root, group.rank()));
    const SnapshotParts parts = make_parts(kTwoRanks, group.rank(), true);
    output = testing::failure_of([&] { save_sharded(folder, 3, parts, group); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  EXPECT_THAT(
      result.ranks[0].output,
      ::testing::AllOf(HasSubstr("kUnavailable"), HasSubstr("rank 1: " + root + "/of-1/"),
                       HasSubstr(" does not exist, which rank 0 has made as " + root + "/of-0/"),
                       HasSubstr("all ranks must pass the same run folder")));
}

TEST(ShardedSave, StatesThatWouldHaveOneNameInTheFilesAreRefused) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  SnapshotParts parts;
  parts.parameters = {whole_tensor("w", torch::zeros({2})), whole_tensor("w.a", torch::ones({2}))};
  parts.optimizer = {{.parameter = "w", .tensors = {{"a.b", torch::zeros({2})}}},
                     {.parameter = "w.a", .tensors = {{"b", torch::ones({2})}}}};
  EXPECT_EQ(testing::failure_of([&] { save_sharded(folder, 3, parts); }),
            "kInvalidArgument: snapshot of step 3: the states 'a.b' of 'w' and 'b' of 'w.a' would "
            "have one name in the files, 'state.w.a.b'; rename one of the parameters");
  EXPECT_TRUE(fs::is_empty(run.path()));
}

// check_savable() throws the same error as a save, but before any snapshot is written.
TEST(ShardedSave, WhatCannotBeSavedIsKnownBeforeTheFirstSnapshot) {
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    SnapshotParts parts = make_parts(kTwoRanks, group.rank(), true);
    check_savable(parts, group);
    for (const char* const text : {"7", "", "epoch 3", "[1]", "{\"a\": \"\xff\"}"}) {
      SnapshotParts other = parts;
      // Only rank 0 writes `extra`, so only its text is checked.
      if (group.rank() == 0) other.extra = text;
      const std::string refusal = testing::failure_of([&] { check_savable(other, group); });
      testing::require(refusal.find("kInvalidArgument: snapshot: rank 0: SnapshotParts::extra must "
                                    "be a JSON object, such as {\"epoch\": 3}, but is ") == 0,
                       refusal);
    }
    const std::string mesh =
        testing::failure_of([&] { check_savable(parts, group, {.mesh = "\xff"}); });
    testing::require(
        mesh == "kInvalidArgument: snapshot: rank 0: `mesh` of the options is no UTF-8 text", mesh);
    SnapshotParts renamed = parts;
    renamed.parameters[0].name = "__metadata__";
    renamed.optimizer.clear();
    const std::string reserved = testing::failure_of([&] { check_savable(renamed, group); });
    testing::require(reserved ==
                         "kInvalidArgument: snapshot: rank 0: '__metadata__' has a name that is "
                         "reserved by the safetensors format",
                     reserved);
    if (group.rank() == 1) parts.parameters[0].values = at::Tensor();
    const std::string failure = testing::failure_of([&] { check_savable(parts, group); });
    testing::require(
        failure == "kInvalidArgument: snapshot: rank 1: 'fc.weight' is no dense tensor with memory",
        failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedSave, WhatARankCannotGiveIsNamedWithTheRank) {
  EXPECT_EQ(
      save_error([](SnapshotParts& parts) { parts.parameters[0].values = at::Tensor(); }, 1),
      "kInvalidArgument: snapshot of step 3: rank 1: 'fc.weight' is no dense tensor with memory");
  EXPECT_EQ(
      save_error([](SnapshotParts& parts) { parts.parameters[0].values = torch::zeros({3}); }, 0),
      "kInvalidArgument: snapshot of step 3: rank 0: 'fc.weight' has 3 elements on this rank, "
      "but its boxes have 18");
  EXPECT_EQ(
      save_error([](SnapshotParts& parts) { parts.optimizer[0].parameter = "other"; }, 1),
      "kInvalidArgument: snapshot of step 3: rank 1: 'other' has an optimizer's state, but is "
      "none of the parameters");
  EXPECT_EQ(save_error([](SnapshotParts& parts) { parts.buffers[0].name = "fc.weight"; }, 0),
            "kInvalidArgument: snapshot of step 3: rank 0: 'fc.weight' occurs twice");
  EXPECT_EQ(
      save_error([](SnapshotParts& parts) { parts.buffers[0].name = "\xff"; }, 0),
      "kInvalidArgument: snapshot of step 3: rank 0: '\xff' has a name that is no UTF-8 text");
  EXPECT_EQ(
      save_error([](SnapshotParts& parts) { parts.extra = "[" + std::string(48, '3') + "]"; }, 0),
      "kInvalidArgument: snapshot of step 3: rank 0: SnapshotParts::extra must be a JSON "
      "object, such as {\"epoch\": 3}, but is [" +
          std::string(39, '3') + "... (the manifest cannot be written: `extra` is no JSON object)");
  EXPECT_THAT(save_error(
                  [](SnapshotParts& parts) {
                    parts.optimizer[0].scalars.emplace_back("lr", torch::zeros({1}));
                  },
                  1),
              HasSubstr("rank 1: 'state.fc.weight.lr' has sizes (1); a scalar must have none"));
}

// Rank 0 saves while rank 1 runs another all_gather, as FullyShardedDataParallel does before an
// unexpected use of a unit. Rank 0 must not take the number that it receives for the length of a
// message and allocate memory for it.
TEST(ShardedSave, ARankThatSavesAloneIsToldSo) {
  const testing::TemporaryFolder run;
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    if (group.rank() == 0) {
      SnapshotFolder folder(run.path());
      output = testing::failure_of(
          [&] { save_sharded(folder, 3, make_parts(kTwoRanks, 0, true), group); });
      return;
    }
    try {
      group.all_gather(torch::empty({2}, torch::kLong),
                       torch::full({1}, int64_t{1} << 60, torch::kLong));
    } catch (const Error& error) {
      output = error.message();
    }
  });
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("the ranks disagree: rank 0"));
    EXPECT_THAT(rank.output, HasSubstr("all_gather(int64 x 1)"));
  }
  EXPECT_TRUE(fs::is_empty(run.path()));
}

TEST(ShardedSave, PartsWithoutTheirGroupAreRefused) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  EXPECT_THAT(testing::failure_of([&] { save_sharded(folder, 3, make_parts(kTwoRanks, 0, true)); }),
              HasSubstr("without a group this process must hold the whole tensor: pass the group "
                        "of the ranks that hold its parts"));
  EXPECT_TRUE(fs::is_empty(run.path()));
}

}  // namespace
}  // namespace cadre
