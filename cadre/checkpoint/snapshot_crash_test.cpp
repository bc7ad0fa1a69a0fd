// If a snapshot is interrupted at any file operation, the previous one stays usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "cadre/base/format.h"
#include "cadre/checkpoint/file_operations_test.h"
#include "cadre/checkpoint/full_state.h"
#include "cadre/checkpoint/sharded_load.h"
#include "cadre/checkpoint/sharded_save.h"
#include "cadre/checkpoint/sharded_snapshot_test.h"
#include "cadre/group/process_group_test_ranks.h"
#include "cadre/testing/temporary_folder.h"
#include "cadre/wrap/wrap_test_support.h"

namespace cadre {
namespace {

using snapshot_test::difference;
using snapshot_test::FaultKind;
using snapshot_test::FileFault;
using snapshot_test::make_parts;
using snapshot_test::Strategy;
using snapshot_test::World;

const World kAlone{Strategy::kReplicated, 1};

// Parts whose elements all equal the step.
SnapshotParts parts_of_step(int64_t step) {
  SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/true);
  const at::NoGradGuard no_grad;
  for (SnapshotTensor& tensor : parts.parameters) tensor.values.fill_(step);
  return parts;
}

// "" if the latest snapshot of the run is complete and of one of the two steps, which is stored in
// `step`.
std::string problem_of_latest(const std::string& run, int64_t* step) {
  const auto latest = SnapshotFolder(run).latest();
  if (!latest) return "there is no snapshot";
  SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/false);
  try {
    LoadedSnapshot loaded = load_sharded(*latest, parts);
    *step = loaded.step;
    parts.optimizer = std::move(loaded.optimizer);
  } catch (const Error& error) {
    return error.message();
  }
  return difference(parts_of_step(*step), parts);
}

// To save the time of the disk: while a fault is armed that is never reached, syncs are skipped.
void save_quickly(SnapshotFolder& folder, int64_t step) {
  const FileFault never(FaultKind::kError, std::numeric_limits<int64_t>::max());
  save_sharded(folder, step, parts_of_step(step));
}

// Saves `next` over and over, interrupted at its n-th operation for n = 1, 2, ...
void interrupt_everywhere(FaultKind kind, int64_t next) {
  constexpr int64_t kBefore = 1;
  for (int64_t n = 1;; ++n) {
    SCOPED_TRACE(cadre::format("operation {}", n));
    const testing::TemporaryFolder run;
    SnapshotFolder folder(run.path());
    save_quickly(folder, kBefore);
    // The other step of a run that goes back is there already.
    if (next != kBefore + 1) save_quickly(folder, next);
    std::string failure;
    bool has_struck = false;
    {
      FileFault fault(kind, n);
      failure = testing::failure_of([&] { save_sharded(folder, next, parts_of_step(next)); });
      has_struck = fault.has_struck();
      if (kind == FaultKind::kPowerCut) fault.lose_what_was_not_synced(run.path());
    }
    int64_t step = 0;
    ASSERT_EQ(problem_of_latest(run.path(), &step), "");
    EXPECT_TRUE(next == kBefore + 1 || step == next) << "a committed step is lost";
    for (const int64_t each : SnapshotFolder(run.path()).steps()) {
      SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/false);
      EXPECT_EQ(load_sharded(folder.path_of(each), parts).step, each);
    }
    if (!has_struck) {
      ASSERT_EQ(failure, "");
      EXPECT_EQ(step, next);
      EXPECT_GT(n, 10);
      return;
    }
    EXPECT_TRUE(!failure.empty() || step == next);
    // The next attempt succeeds.
    save_quickly(folder, next);
    ASSERT_EQ(problem_of_latest(run.path(), &step), "");
    EXPECT_EQ(step, next);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(run.path()), {}), 3);
  }
}

TEST(SnapshotCrash, AFullDiskAtAnyOperationLeavesTheSnapshotBefore) {
  interrupt_everywhere(FaultKind::kError, 2);
}

TEST(SnapshotCrash, APowerCutAtAnyOperationLeavesTheSnapshotBefore) {
  interrupt_everywhere(FaultKind::kPowerCut, 2);
}

TEST(SnapshotCrash, APowerCutWhileAStepIsSavedAgainLeavesOneOfTheTwo) {
  interrupt_everywhere(FaultKind::kPowerCut, 3);
}

// After the call has returned, the file survives any crash.
TEST(SnapshotCrash, AFullStateOutlivesAPowerCut) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  save_quickly(folder, 1);
  const std::string file = run.file("whole.safetensors");
  {
    FileFault fault(FaultKind::kPowerCut, std::numeric_limits<int64_t>::max());
    write_full_state(folder.path_of(1), file);
    fault.lose_what_was_not_synced(run.path());
  }
  SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/false);
  load_sharded(file, parts);
  EXPECT_TRUE(parts.parameters[0].values.eq(1).all().item<bool>());
}

TEST(SnapshotCrash, AFullStateIsNotMadeOfDamagedFiles) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  save_quickly(folder, 1);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path_of(1))) {
    if (entry.path().filename().string().find("-model-") == std::string::npos) continue;
    std::fstream stream(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);  // in the values
    stream.put('\x7f');
  }
  const std::string file = run.file("whole.safetensors");
  EXPECT_THAT(
      testing::error_of([&] { write_full_state(folder.path_of(1), file); }, ErrorCode::kCorruption),
      ::testing::HasSubstr("its bytes do not match its digest"));
  EXPECT_FALSE(std::filesystem::exists(file));
}

// With two ranks the error of one rank is returned on both, and names it.
TEST(SnapshotCrash, AnErrorOfOneRankIsThatOfAll) {
  const testing::TemporaryFolder run;
  const World world{Strategy::kFlat, 2};
  const auto save = [&](int64_t step) {
    return testing::run_groups(2, [&, step](const ProcessGroup& group, std::string& output) {
      SnapshotFolder folder(run.path());
      try {
        save_sharded(folder, step, make_parts(world, group.rank(), true), group);
      } catch (const Error& error) {
        output = error.message();
      }
    });
  };
  const auto first = save(1);
  ASSERT_TRUE(first.ok() && first.ranks[0].output.empty()) << first.ranks[0].output;
  bool has_named_rank_1 = false;
  for (int64_t n = 1; n < 200; ++n) {
    const FileFault fault(FaultKind::kError, n);
    const auto result = save(2);
    ASSERT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
    if (!fault.has_struck()) {
      EXPECT_EQ(result.ranks[0].output, "");
      EXPECT_TRUE(has_named_rank_1);
      return;
    }
    EXPECT_THAT(result.ranks[0].output, ::testing::HasSubstr("No space left on device"));
    EXPECT_THAT(result.ranks[0].output, ::testing::StartsWith("snapshot of step 2: "));
    has_named_rank_1 |= result.ranks[0].output.starts_with("snapshot of step 2: rank 1: ");
    SnapshotParts parts = make_parts(kAlone, 0, false);
    load_sharded(*SnapshotFolder(run.path()).latest(), parts);
  }
  FAIL() << "the save never ends";
}

}  // namespace
}  // namespace cadre
