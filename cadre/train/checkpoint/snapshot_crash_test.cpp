// Tests that the previous snapshot stays usable if a save is interrupted at any file operation. The
// saves run on a simulated disk. Its files are then copied to a real folder, because the reader
// needs files of the operating system.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/sim/simulated_disk.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/snapshot_samples.h"
#include "cadre/testing/torch/wrap_net.h"
#include "cadre/train/checkpoint/on_file_system.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using sim::Unsynced;
using snapshot_test::difference;
using snapshot_test::Division;
using snapshot_test::make_parts;
using snapshot_test::World;

const World kAlone{Division::kReplicated, 1};

// Returns parts in which every element equals the step.
SnapshotParts parts_of_step(int64_t step) {
  SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/true);
  const at::NoGradGuard no_grad;
  for (SnapshotTensor& tensor : parts.parameters) tensor.values.fill_(step);
  return parts;
}

constexpr const char* kRun = "/runs/gpt";

void copy_folder(sim::SimulatedDisk& disk, const std::string& from, const std::string& to) {
  for (const std::string& name : disk.list(from).value_or_throw()) {
    const std::string path = from + "/" + name;
    if (disk.kind_of(path).value_or_throw() == os::FileKind::kFolder) {
      std::filesystem::create_directory(to + "/" + name);
      copy_folder(disk, path, to + "/" + name);
    } else {
      const std::string content = disk.read(path, 1 << 20).value_or_throw();
      std::ofstream(to + "/" + name, std::ios::binary) << content;
    }
  }
}

// Checks all snapshots on the disk: each must be complete, and the latest must hold the elements of
// its own step. Returns the problem, or an empty text. Writes the step of the latest snapshot to
// `step`.
std::string problem_of_run(sim::SimulatedDisk& disk, int64_t* step) {
  const testing::TemporaryFolder copy;
  copy_folder(disk, kRun, copy.path());
  const SnapshotFolder folder(copy.path());
  const auto latest = folder.latest();
  if (!latest) return "there is no snapshot";
  SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/false);
  try {
    LoadedSnapshot loaded = load_sharded(*latest, parts);
    *step = loaded.step;
    parts.optimizer = std::move(loaded.optimizer);
    for (const int64_t each : folder.steps()) {
      SnapshotParts others = make_parts(kAlone, 0, /*is_filled=*/false);
      if (load_sharded(folder.path_of(each), others).step != each)
        return "a snapshot contains another step than its folder's name says";
    }
  } catch (const Error& error) {
    return error.message();
  }
  return difference(parts_of_step(*step), parts);
}

// Makes the n-th file operation fail. With `after_power_cut`, all later operations fail, too, and
// the disk then has only those unsynced changes that `after_power_cut` selects.
void interrupt(sim::SimulatedDisk& disk, std::optional<Unsynced> after_power_cut, uint64_t n) {
  if (after_power_cut) {
    disk.cut_power_at(n);
  } else {
    disk.fail_operation(n);
  }
}

// Lets operations succeed again. Returns whether the n-th operation was reached, so that it failed.
bool end_interruption(sim::SimulatedDisk& disk, std::optional<Unsynced> after_power_cut) {
  const bool has_struck = disk.has_failed();
  disk.fail_operation(0);
  if (after_power_cut) disk.lose_power(*after_power_cut);
  return has_struck;
}

// Saves step `next` repeatedly. In the n-th attempt the n-th file operation fails.
void interrupt_everywhere(std::optional<Unsynced> after_power_cut, int64_t next) {
  constexpr int64_t kBefore = 1;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(cadre::format("operation {}", n));
    sim::SimulatedDisk disk;
    SnapshotFolder folder = snapshot_folder_on(disk, kRun);
    save_sharded(folder, kBefore, parts_of_step(kBefore));
    // If `next` is not step 2, the interrupted save replaces a snapshot of the same step.
    if (next != kBefore + 1) save_sharded(folder, next, parts_of_step(next));
    interrupt(disk, after_power_cut, n);
    const std::string failure =
        testing::failure_of([&] { save_sharded(folder, next, parts_of_step(next)); });
    const bool has_struck = end_interruption(disk, after_power_cut);
    int64_t step = 0;
    ASSERT_EQ(problem_of_run(disk, &step), "");
    EXPECT_TRUE(next == kBefore + 1 || step == next) << "a committed step is lost";
    EXPECT_EQ(step, folder.steps().back()) << "a complete snapshot is ignored";
    if (!has_struck) {
      ASSERT_EQ(failure, "");
      EXPECT_EQ(step, next);
      EXPECT_GT(n, 20);
      return;
    }
    EXPECT_TRUE(!failure.empty() || step == next);
    // The next attempt succeeds.
    save_sharded(folder, next, parts_of_step(next));
    ASSERT_EQ(problem_of_run(disk, &step), "");
    EXPECT_EQ(step, next);
    EXPECT_EQ(disk.list(kRun).value_or_throw().size(), 3U) << "expected two snapshots and `latest`";
  }
}

TEST(SnapshotCrash, AFailureOfAnyOperationLeavesTheSnapshotBefore) {
  interrupt_everywhere(std::nullopt, 2);
}

TEST(SnapshotCrash, APowerCutAtAnyOperationLeavesTheSnapshotBefore) {
  interrupt_everywhere(Unsynced::kNone, 2);
  interrupt_everywhere(Unsynced::kOnlyWhatDestroys, 2);
}

TEST(SnapshotCrash, APowerCutWhileAStepIsSavedAgainLeavesOneOfTheTwo) {
  interrupt_everywhere(Unsynced::kNone, 3);
  interrupt_everywhere(Unsynced::kOnlyWhatDestroys, 3);
}

// Writes a snapshot that consists of one text file, for the tests of set_aside_after().
void save_text(SnapshotFolder& folder, int64_t step, std::string_view text) {
  folder.save(step, [&](const std::string& path) {
    const std::array<ConstBytes, 1> pieces = {std::as_bytes(std::span(text))};
    os::write_file(files_of(folder), path + "/x", pieces).value_or_throw();
  });
}
std::string latest_text(const SnapshotFolder& folder) {
  const auto latest = folder.latest();
  return latest ? files_of(folder).read(*latest + "/x", 100).value_or_throw() : "none";
}

// Runs `prepare`, then `act`, whose n-th file operation fails, then `check`; for n = 1, 2, .... The
// argument of `check` says whether `act` returned without an error.
void interrupt_branch(const std::function<void(SnapshotFolder&)>& prepare,
                      const std::function<void(SnapshotFolder&)>& act,
                      const std::function<void(SnapshotFolder&, bool has_returned)>& check) {
  using Cut = std::optional<Unsynced>;
  for (const Cut cut : {Cut(), Cut(Unsynced::kNone), Cut(Unsynced::kOnlyWhatDestroys)}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(cadre::format("operation {}", n));
      sim::SimulatedDisk disk;
      SnapshotFolder folder = snapshot_folder_on(disk, kRun);
      prepare(folder);
      interrupt(disk, cut, n);
      const std::string failure = testing::failure_of([&] { act(folder); });
      const bool has_struck = end_interruption(disk, cut);
      check(folder, failure.empty());
      if (!has_struck) break;
      ASSERT_LT(n, 100);
    }
  }
}

// Saves three snapshots, of steps 100, 200 and 300. The tests then go back to step 100, so the
// later two become abandoned.
void save_three(SnapshotFolder& folder) {
  for (const int64_t step : {100, 200, 300}) save_text(folder, step, std::to_string(step));
}

TEST(SnapshotCrash, GoingBackContinuesFromTheChosenStepOnceItHasBegun) {
  interrupt_branch(
      save_three, [](SnapshotFolder& folder) { folder.set_aside_after(100); },
      [](SnapshotFolder& folder, bool has_returned) {
        const std::string latest = latest_text(folder);
        EXPECT_TRUE(latest == "100" || (!has_returned && latest == "300")) << latest;
        // `latest` is written before the first snapshot is moved, so if one was moved, `latest`
        // must name step 100.
        if (folder.steps().size() < 3) EXPECT_EQ(latest, "100");
        folder.set_aside_after(100);
        EXPECT_EQ(folder.steps(), std::vector<int64_t>{100});
        EXPECT_EQ(latest_text(folder), "100");
      });
}

TEST(SnapshotCrash, TheFirstSnapshotOfABranchIsTheLatestAsSoonAsItIsComplete) {
  for (const int64_t step : {150, 300}) {
    interrupt_branch(
        [](SnapshotFolder& folder) {
          save_three(folder);
          folder.set_aside_after(100);
        },
        [step](SnapshotFolder& folder) { save_text(folder, step, "new"); },
        [](SnapshotFolder& folder, bool has_returned) {
          const bool is_complete = folder.steps().size() == 2;
          EXPECT_EQ(latest_text(folder), is_complete ? "new" : "100");
          EXPECT_TRUE(is_complete || !has_returned);
          // The next save must work with any state that the interruption has left, even if that
          // save itself fails.
          (void)testing::failure_of([&] {
            folder.save(
                400, [](const std::string&) { throw Error(ErrorCode::kUnavailable, "disk full"); });
          });
          EXPECT_EQ(latest_text(folder), is_complete ? "new" : "100");
          save_text(folder, 400, "next");
          EXPECT_EQ(latest_text(folder), "next");
        });
  }
}

// A program goes back to an earlier step without calling set_aside_after(), and saves the step of a
// now obsolete snapshot again.
TEST(SnapshotCrash, AnAbandonedSnapshotIsNeverTakenForTheLatest) {
  interrupt_branch(
      [](SnapshotFolder& folder) {
        save_three(folder);
        save_text(folder, 150, "new 150");
      },
      [](SnapshotFolder& folder) { save_text(folder, 300, "new 300"); },
      [](SnapshotFolder& folder, bool has_returned) {
        const std::string latest = latest_text(folder);
        EXPECT_TRUE(latest == "new 300" || (!has_returned && latest == "new 150")) << latest;
        save_text(folder, 300, "newer 300");
        EXPECT_EQ(latest_text(folder), "newer 300");
        EXPECT_EQ(files_of(folder).list(kRun).value_or_throw().size(), 5U)
            << "expected four snapshots and `latest`";
      });
}

// Repeats the save of step 2 on disks that are too small for it, of many sizes. It must fail with
// an error, and the snapshot of step 1 must stay the latest.
TEST(SnapshotCrash, AFullDiskLeavesTheSnapshotBeforeAndNothingElse) {
  const auto bytes_of_snapshots = [](int count) {
    for (size_t capacity = 1024;; capacity += 1024) {
      sim::SimulatedDisk disk(capacity);
      SnapshotFolder folder = snapshot_folder_on(disk, kRun);
      const std::string failure = testing::failure_of([&] {
        for (int step = 1; step <= count; ++step) save_sharded(folder, step, parts_of_step(step));
      });
      if (failure.empty()) return capacity;
    }
  };
  const size_t smallest = bytes_of_snapshots(1);
  const size_t enough = bytes_of_snapshots(2);
  ASSERT_GT(enough, smallest + 4 * 1024);
  for (size_t capacity = smallest; capacity < enough; capacity += 1024) {
    SCOPED_TRACE(cadre::format("{} bytes", capacity));
    sim::SimulatedDisk disk(capacity);
    SnapshotFolder folder = snapshot_folder_on(disk, kRun);
    save_sharded(folder, 1, parts_of_step(1));
    EXPECT_THAT(testing::failure_of([&] { save_sharded(folder, 2, parts_of_step(2)); }),
                ::testing::AllOf(::testing::StartsWith("kUnavailable: snapshot of step 2: "),
                                 ::testing::HasSubstr("no space left on the disk")));
    int64_t step = 0;
    ASSERT_EQ(problem_of_run(disk, &step), "");
    EXPECT_EQ(step, 1);
    EXPECT_EQ(disk.list(kRun).value_or_throw().size(), 2U) << "expected a snapshot and `latest`";
  }
}

// When mark_best() or keep_last() has returned, `best` and the kept folders must survive a power
// cut.
TEST(SnapshotCrash, TheBestAndTheKeptSnapshotsOutliveAPowerCut) {
  sim::SimulatedDisk disk;
  SnapshotFolder folder = snapshot_folder_on(disk, kRun);
  for (const int64_t step : {1, 2, 3}) save_sharded(folder, step, parts_of_step(step));
  folder.mark_best(1);
  folder.keep_last(1);
  disk.lose_power();
  EXPECT_EQ(folder.best(), folder.path_of(1));
  EXPECT_EQ(folder.latest(), folder.path_of(3));
  int64_t step = 0;
  EXPECT_EQ(problem_of_run(disk, &step), "");
  EXPECT_EQ(step, 3);
}

// A folder that has the name of a step must contain all files of its snapshot, even after a power
// cut.
TEST(SnapshotCrash, APowerCutWhileSnapshotsAreRemovedLeavesNoPartialOne) {
  for (const Unsynced kept : {Unsynced::kNone, Unsynced::kOnlyWhatDestroys}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(cadre::format("operation {}", n));
      sim::SimulatedDisk disk;
      SnapshotFolder folder = snapshot_folder_on(disk, kRun);
      for (const int64_t step : {1, 2}) save_sharded(folder, step, parts_of_step(step));
      interrupt(disk, kept, n);
      (void)testing::failure_of([&] { folder.keep_last(1); });
      const bool has_struck = end_interruption(disk, kept);
      int64_t step = 0;
      ASSERT_EQ(problem_of_run(disk, &step), "");
      EXPECT_EQ(step, 2);
      if (has_struck) continue;
      EXPECT_EQ(folder.steps(), std::vector<int64_t>{2});
      EXPECT_GT(n, 10);
      break;
    }
  }
}

TEST(SnapshotCrash, AnInterruptionLeavesTheFormerBestOrTheNewOne) {
  using Cut = std::optional<Unsynced>;
  for (const Cut after : {Cut(), Cut(Unsynced::kNone), Cut(Unsynced::kOnlyWhatDestroys)}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(cadre::format("operation {}", n));
      sim::SimulatedDisk disk;
      SnapshotFolder folder = snapshot_folder_on(disk, kRun);
      for (const int64_t step : {1, 2}) save_sharded(folder, step, parts_of_step(step));
      folder.mark_best(1);
      interrupt(disk, after, n);
      const std::string failure = testing::failure_of([&] { folder.mark_best(2); });
      const bool has_struck = end_interruption(disk, after);
      EXPECT_EQ(failure.empty(), !has_struck);
      const auto best = folder.best();
      EXPECT_TRUE(best == folder.path_of(2) || (has_struck && best == folder.path_of(1)));
      if (!has_struck) break;
    }
  }
}

// When write_full_state() has returned, the file must survive a power cut.
TEST(SnapshotCrash, AFullStateOutlivesAPowerCut) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  save_sharded(folder, 1, parts_of_step(1));
  sim::SimulatedDisk disk;
  write_full_state(folder.path_of(1), disk, "/whole.safetensors", SnapshotContent::kModel);
  disk.lose_power();
  const testing::TemporaryFolder copy;
  copy_folder(disk, "/", copy.path());
  SnapshotParts parts = make_parts(kAlone, 0, /*is_filled=*/false);
  load_sharded(copy.file("whole.safetensors"), parts);
  EXPECT_TRUE(parts.parameters[0].values.eq(1).all().item<bool>());
}

// `write` replaces the file /model.safetensors, which is on the disk already. If any file operation
// fails, the path must hold the old or the new content, both before and after a power cut.
void replace_interrupted(const std::function<void(sim::SimulatedDisk&)>& write) {
  const std::string path = "/model.safetensors";
  const std::string old = "old";
  std::string whole;
  for (uint64_t n = 0;; ++n) {
    SCOPED_TRACE(cadre::format("operation {}", n));
    sim::SimulatedDisk disk;
    os::replace_file(disk, path, std::as_bytes(std::span(old))).value_or_throw();
    disk.fail_operation(n);
    const std::string failure = testing::failure_of([&] { write(disk); });
    const bool is_complete = !disk.has_failed();
    disk.fail_operation(0);
    EXPECT_EQ(failure.empty(), is_complete) << failure;
    EXPECT_EQ(disk.list("/").value_or_throw().size(), 1U) << "a temporary file was not removed";
    for (const bool has_lost_power : {false, true}) {
      if (has_lost_power) disk.lose_power(Unsynced::kOnlyWhatDestroys);
      const std::string content = disk.read(path, 1 << 20).value_or_throw();
      if (n == 0 && !has_lost_power) whole = content;
      EXPECT_TRUE(content == whole || (!is_complete && content == old)) << content.size();
    }
    if (n > 0 && is_complete) {
      EXPECT_GT(n, 5);
      return;
    }
  }
}

TEST(SnapshotCrash, AModuleFileIsReplacedAsAWholeOrNotAtAll) {
  const torch::nn::Linear module(2, 1);
  replace_interrupted(
      [&](sim::SimulatedDisk& disk) { cadre::save(*module, disk, "/model.safetensors"); });
}

TEST(SnapshotCrash, AFullStateIsReplacedAsAWholeOrNotAtAll) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  save_sharded(folder, 1, parts_of_step(1));
  replace_interrupted([&](sim::SimulatedDisk& disk) {
    write_full_state(folder.path_of(1), disk, "/model.safetensors", SnapshotContent::kModel);
  });
}

TEST(SnapshotCrash, AFullStateIsNotMadeOfDamagedFiles) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  save_sharded(folder, 1, parts_of_step(1));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path_of(1))) {
    if (entry.path().filename().string().find("-model-") == std::string::npos) continue;
    std::fstream stream(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);  // a byte of the tensor's values
    stream.put('\x7f');
  }
  const std::string file = run.file("whole.safetensors");
  EXPECT_THAT(
      testing::error_of([&] { write_full_state(folder.path_of(1), file); }, ErrorCode::kCorruption),
      ::testing::HasSubstr("its bytes do not match its digest"));
  EXPECT_FALSE(std::filesystem::exists(file));
}

// If a file operation of one of two ranks fails, both ranks must throw an error that names this
// rank.
TEST(SnapshotCrash, AnErrorOfOneRankIsThatOfAll) {
  sim::SimulatedDisk disk;
  const World world{Division::kFlat, 2};
  const auto save = [&](int64_t step) {
    return testing::run_groups(2, [&, step](const ProcessGroup& group, std::string& output) {
      SnapshotFolder folder = snapshot_folder_on(disk, kRun);
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
  for (uint64_t n = 1; n < 200; ++n) {
    disk.fail_operation(n);
    const auto result = save(2);
    const bool has_failed = disk.has_failed();
    disk.fail_operation(0);
    ASSERT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
    if (!has_failed) {
      EXPECT_EQ(result.ranks[0].output, "");
      EXPECT_TRUE(has_named_rank_1);
      return;
    }
    const testing::TemporaryFolder copy;
    copy_folder(disk, kRun, copy.path());
    const SnapshotFolder folder(copy.path());
    SnapshotParts parts = make_parts(kAlone, 0, false);
    load_sharded(*folder.latest(), parts);
    const std::string& output = result.ranks[0].output;
    // The save succeeded: the operation that failed only removed old files.
    if (output.empty()) {
      EXPECT_EQ(folder.latest_step(), 2);
      continue;
    }
    EXPECT_THAT(output, ::testing::HasSubstr("the operation failed"));
    EXPECT_THAT(output, ::testing::StartsWith("snapshot of step 2: "));
    has_named_rank_1 |= output.starts_with("snapshot of step 2: rank 1: ");
  }
  FAIL() << "the save never ends";
}

}  // namespace
}  // namespace cadre
