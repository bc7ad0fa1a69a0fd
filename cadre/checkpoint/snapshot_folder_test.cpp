#include "cadre/checkpoint/snapshot_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <span>
#include <string>
#include <thread>

#include "cadre/os/files/durable_file.h"
#include "cadre/os/files/file.h"
#include "cadre/testing/ranks.h"
#include "cadre/testing/temporary_folder.h"

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
  const std::string run_ = folder_.file("run");  // not there at first
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
  EXPECT_NO_THROW(folder.keep_last(2)) << "of a run that has none";
  for (const int64_t step : {500, 100, 200, 300, 400}) save(step, "a");
  folder.mark_best(100);
  save(250, "b");  // the latest is not the highest
  folder.keep_last(2);
  EXPECT_EQ(folder.steps(), (std::vector<int64_t>{100, 250, 400, 500}));
  EXPECT_EQ(content_of_latest(), "b");
  EXPECT_EQ(num_entries(), 6) << "the snapshots, latest and best";
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
  save(100, "c");  // a run that went back
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
  EXPECT_EQ(num_entries(), 3u);
}

// A child writes the snapshots of three steps, again and again.
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
    std::this_thread::sleep_for(std::chrono::microseconds(round * 317));  // another moment
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "a snapshot failed";
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

TEST_F(SnapshotFolderTest, SaysWhereItCannotWrite) {
  const auto never = [](const std::string&) {
    ADD_FAILURE() << "there is no folder to write into";
  };
  EXPECT_THAT(testing::failure_of([&] { SnapshotFolder("/proc/none").save(1, never); }),
              ::testing::HasSubstr("make the folder /proc/none"));
}

}  // namespace
}  // namespace cadre
