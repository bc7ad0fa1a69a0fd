#include "cadre/train/checkpoint/snapshot_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/sim/simulated_disk.h"
#include "cadre/testing/core/forwarding_files.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/checkpoint/on_file_system.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

class SnapshotFolderTest : public ::testing::Test {
 protected:
  static void write(const std::string& folder, std::string_view text) {
    const std::array<ConstBytes, 1> pieces = {std::as_bytes(std::span(text))};
    os::write_file(folder + "/x", pieces).value_or_throw();
  }
  void save(int64_t step, std::string_view text) {
    SnapshotFolder(run_).save(step, [&](const std::string& folder) { write(folder, text); });
  }
  std::string content_of_latest() {
    const auto latest = SnapshotFolder(run_).latest();
    return latest ? *os::read_file(*latest + "/x", 100) : "none";
  }
  size_t num_entries() {
    return static_cast<size_t>(std::distance(fs::directory_iterator(run_), {}));
  }

  testing::TemporaryFolder folder_;
  const std::string run_ = folder_.file("run");  // this folder does not exist at first
};

TEST_F(SnapshotFolderTest, BestIsTheOneThatWasMarked) {
  save(100, "a");
  save(200, "b");
  EXPECT_FALSE(SnapshotFolder(run_).best());
  SnapshotFolder(run_).mark_best(100);
  EXPECT_EQ(SnapshotFolder(run_).best(), run_ + "/step-000100");
  EXPECT_EQ(SnapshotFolder(run_).latest(), run_ + "/step-000200");
}

TEST_F(SnapshotFolderTest, KeepsTheLastTheLatestAndTheBest) {
  SnapshotFolder folder(run_);
  EXPECT_NO_THROW(folder.keep_last(2)) << "the run has no snapshot yet";
  for (const int64_t step : {500, 100, 200, 300, 400}) save(step, "a");
  folder.mark_best(100);
  save(250, "b");  // the latest snapshot need not have the highest step
  folder.keep_last(2);
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{100, 250, 400, 500}));
  EXPECT_EQ(content_of_latest(), "b");
  EXPECT_EQ(num_entries(), 6) << "expected four snapshots, `latest` and `best`";
  folder.keep_last(0);
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{100, 250}));
}

TEST_F(SnapshotFolderTest, LatestIsTheLastThatWasSaved) {
  EXPECT_EQ(content_of_latest(), "none");
  EXPECT_FALSE(SnapshotFolder(run_).latest_step());
  save(100, "a");
  EXPECT_EQ(SnapshotFolder(run_).latest(), run_ + "/step-000100");
  save(200, "b");
  EXPECT_EQ(content_of_latest(), "b");
  EXPECT_EQ(SnapshotFolder(run_).latest_step(), 200);
  save(100, "c");  // saved by a run that has gone back to an earlier step
  EXPECT_EQ(content_of_latest(), "c");
  EXPECT_EQ(num_entries(), 3u);  // two snapshots and `latest`
}

TEST_F(SnapshotFolderTest, WhereLatestNamesNoneItIsTheOneOfTheHighestStep) {
  for (const int64_t step : {20, 100, 1'000'000, 9}) save(step, "x");
  fs::create_directories(run_ + "/step-older");
  fs::create_directories(run_ + "/.step-9000000.tmp");
  const SnapshotFolder snapshots(run_);
  EXPECT_EQ(snapshots.latest_step(), 9);
  EXPECT_THAT(snapshots.steps(), ::testing::ElementsAre(9, 20, 100, 1'000'000));
  fs::remove_all(run_ + "/step-000009");
  EXPECT_EQ(snapshots.latest_step(), 1'000'000);
  for (const std::string content : {"", "\n", "..\n", "step-\n", "step-000100x\n"}) {
    ASSERT_TRUE(os::replace_file(run_ + "/latest", std::as_bytes(std::span(content))).ok());
    EXPECT_EQ(snapshots.latest_step(), 1'000'000) << content;
  }
  fs::remove(run_ + "/latest");
  fs::remove_all(run_ + "/step-1000000");
  EXPECT_EQ(snapshots.latest(), run_ + "/step-000100");
  EXPECT_FALSE(SnapshotFolder(run_ + "/none").latest());
}

TEST_F(SnapshotFolderTest, LaterSnapshotsAreSetAside) {
  for (const int64_t step : {100, 200, 300}) save(step, std::to_string(step));
  SnapshotFolder folder(run_);
  EXPECT_FALSE(folder.set_aside_after(300));
  EXPECT_EQ(folder.set_aside_after(100), run_ + "/abandoned.1");
  EXPECT_EQ(folder.latest_step(), 100);
  EXPECT_THAT(folder.steps(), ::testing::ElementsAre(100));
  const SnapshotFolder aside(run_ + "/abandoned.1");
  EXPECT_THAT(aside.steps(), ::testing::ElementsAre(200, 300));
  EXPECT_EQ(*os::read_file(aside.path_of(300) + "/x", 100), "300");
  save(200, "again");
  EXPECT_EQ(folder.set_aside_after(100), run_ + "/abandoned.2");
  fs::remove_all(run_ + "/step-000100");
  EXPECT_FALSE(folder.latest());
}

TEST_F(SnapshotFolderTest, AFailedWriteLosesNothing) {
  save(100, "a");
  const auto fail = [](const std::string& folder) {
    write(folder, "half");
    throw Error(ErrorCode::kUnavailable, "disk full");
  };
  EXPECT_EQ(testing::failure_of([&] { SnapshotFolder(run_).save(200, fail); }),
            "kUnavailable: snapshot of step 200: disk full");
  EXPECT_EQ(content_of_latest(), "a");
  EXPECT_EQ(num_entries(), 2u);
}

TEST_F(SnapshotFolderTest, ALatestThatCannotBeWrittenIsAnErrorAndLosesNothing) {
  save(100, "a");
  fs::remove(run_ + "/latest");
  fs::create_directories(run_ + "/latest/in the way");
  EXPECT_THAT(testing::failure_of([&] { save(200, "b"); }), ::testing::HasSubstr(run_ + "/latest"));
  EXPECT_THAT(SnapshotFolder(run_).steps(), ::testing::ElementsAre(100, 200));
  EXPECT_EQ(content_of_latest(), "b");
  EXPECT_EQ(num_entries(), 4u)
      << "expected two snapshots, the folder named `latest`, and the temporary file for `latest`";
  fs::remove_all(run_ + "/latest");
  save(150, "c");
  EXPECT_EQ(content_of_latest(), "c");
  EXPECT_EQ(num_entries(), 4u) << "expected three snapshots and `latest`";
}

// If such a folder counted as step 7, keep_last() would remove path_of(7), which does not exist.
TEST_F(SnapshotFolderTest, AFolderWithAnotherSpellingOfAStepIsNoSnapshot) {
  save(7, "a");
  for (const char* const name : {"step-7", "step-0000008", "step-+00009", "step-00000a", "step-"}) {
    fs::create_directories(run_ + "/" + name);
    EXPECT_FALSE(SnapshotFolder::step_of_folder(run_ + "/" + name)) << name;
  }
  SnapshotFolder folder(run_);
  EXPECT_THAT(folder.steps(), ::testing::ElementsAre(7));
  save(10, "b");
  folder.keep_last(1);
  EXPECT_THAT(folder.steps(), ::testing::ElementsAre(10));
  EXPECT_TRUE(fs::exists(run_ + "/step-0000008"));
  for (const int64_t step : {int64_t{-5}, int64_t{1'234'567}}) {
    EXPECT_EQ(SnapshotFolder::step_of_folder(folder.path_of(step)), step);
  }
}

// While the first save writes, a second save of the same step removes its folder and publishes its
// own.
TEST_F(SnapshotFolderTest, ASaveWhoseFolderAnotherSaveHasRemovedSaysSo) {
  const auto meanwhile = [&](const std::string& folder) {
    save(7, "of the other");
    write(folder, "of this one");
  };
  EXPECT_THAT(testing::failure_of([&] { SnapshotFolder(run_).save(7, meanwhile); }),
              ::testing::AllOf(
                  ::testing::StartsWith("kUnavailable: snapshot of step 7: " + run_ + "/.step-"),
                  ::testing::HasSubstr("was removed while it was written, as another save of the "
                                       "same step in the same run folder does")));
  EXPECT_EQ(content_of_latest(), "of the other");
  EXPECT_EQ(num_entries(), 2u);
}

// The first save of a step publishes its folder at the moment when the second save removes that
// folder.
TEST_F(SnapshotFolderTest, APartOfASnapshotIsNotPublishedWhileAnotherSaveRemovesIt) {
  class Publishing final : public testing::ForwardingFiles {
   public:
    Publishing(std::string attempt, std::string published)
        : attempt_(std::move(attempt)), published_(std::move(published)) {}
    Status remove(const std::string& path) override {
      const Status removed = ForwardingFiles::remove(path);
      if (path.ends_with("/x")) (void)ForwardingFiles::rename(attempt_, published_);
      return removed;
    }

   private:
    const std::string attempt_;
    const std::string published_;
  };
  const std::string attempt = run_ + "/.step-000007.tmp.abcdef";
  const std::string published = run_ + "/step-000007";
  fs::create_directories(attempt);
  write(attempt, "of the first");
  Publishing files(attempt, published);
  snapshot_folder_on(files, run_).save(7, [&](const std::string& folder) {
    EXPECT_FALSE(fs::exists(published)) << "an incomplete folder was published";
    write(folder, "of the second");
  });
  EXPECT_EQ(content_of_latest(), "of the second");
  EXPECT_EQ(num_entries(), 2u);
}

// Two programs write to one run folder. One of them fails at the end of its save and removes the
// temporary file that the other one is about to rename to `latest`.
TEST_F(SnapshotFolderTest, AFileThatBecomesLatestAndIsRemovedMeanwhileIsWrittenAgain) {
  class Removing final : public testing::ForwardingFiles {
   public:
    Status rename(const std::string& from, const std::string& to) override {
      if (from.ends_with("/.latest.next")) (void)remove(from);
      return ForwardingFiles::rename(from, to);
    }
  };
  save(100, "a");
  Removing files;
  const auto write_b = [](const std::string& folder) { write(folder, "b"); };
  snapshot_folder_on(files, run_).save(200, write_b);
  EXPECT_EQ(*os::read_file(run_ + "/latest", 100), "step-000200\n");
  EXPECT_EQ(num_entries(), 3u);
}

// A child process saves snapshots of three steps repeatedly until it is killed.
TEST_F(SnapshotFolderTest, AKillAtAnyMomentLeavesALatestThatIsWhole) {
  save(0, "0");
  for (int round = 0; round < 40; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int64_t i = 0;; ++i) {
        const auto save_one = [&] { save(i % 3, std::to_string(i % 3)); };
        if (!testing::failure_of(save_one).empty()) ::_exit(1);
      }
    }
    // The child is killed at a different time in each iteration.
    std::this_thread::sleep_for(std::chrono::microseconds(round * 317));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself, because a save failed";
    const SnapshotFolder snapshots(run_);
    ASSERT_TRUE(snapshots.latest_step());
    for (const int64_t step : snapshots.steps()) {
      EXPECT_EQ(*os::read_file(snapshots.path_of(step) + "/x", 100), std::to_string(step));
    }
  }
}

TEST_F(SnapshotFolderTest, WhatAKilledRunLeftIsNoSnapshot) {
  save(100, "a");
  fs::create_directories(run_ + "/.step-000200.tmp");
  write(run_ + "/.step-000200.tmp", "half");
  EXPECT_EQ(content_of_latest(), "a");
  save(200, "b");
  EXPECT_EQ(content_of_latest(), "b");
  EXPECT_EQ(num_entries(), 3u);
}

// An unreadable run folder must not count as empty: the run would start at step 0, or continue from
// an earlier step than its last one.
TEST_F(SnapshotFolderTest, AFolderThatCannotBeReadIsAnErrorAndNotAnEmptyOne) {
  sim::SimulatedDisk disk;
  SnapshotFolder folder = snapshot_folder_on(disk, "/run");
  const std::string text = "x";
  for (const int64_t step : {100, 200}) {
    folder.save(step, [&](const std::string& path) {
      const std::array<ConstBytes, 1> pieces = {std::as_bytes(std::span(text))};
      os::write_file(disk, path + "/x", pieces).value_or_throw();
    });
  }
  for (uint64_t n = 1;; ++n) {
    disk.fail_operation(n);
    std::optional<std::string> latest;
    const std::string failure = testing::failure_of([&] { latest = folder.latest(); });
    const bool has_failed = disk.has_failed();
    disk.fail_operation(0);
    EXPECT_EQ(failure.empty(), !has_failed) << n;
    if (has_failed) continue;
    EXPECT_EQ(latest, folder.path_of(200));
    EXPECT_GT(n, 3);
    break;
  }
  disk.fail_operation(1);
  EXPECT_THAT(testing::failure_of([&] { folder.steps(); }), ::testing::HasSubstr("/run"));
}

TEST_F(SnapshotFolderTest, SaysWhereItCannotWrite) {
  const auto never = [](const std::string&) {
    ADD_FAILURE() << "there is no folder to write into";
  };
  EXPECT_THAT(testing::failure_of([&] { SnapshotFolder("/proc/none").save(1, never); }),
              ::testing::HasSubstr("make the folder /proc/none"));
}

}  // namespace
}  // namespace cadre
