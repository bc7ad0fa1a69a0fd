// Tests failures that only a store in a file can have: incomplete writes, killed writers, files of
// earlier jobs.
#include "cadre/core/store/file/file_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/locked_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/file/journal.h"
#include "cadre/core/wire/store/store_record.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class FileStoreTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(seconds(20)); }
  Result<std::unique_ptr<FileStore>> open(int num_ranks = 0, size_t max_bytes = size_t{1} << 30) {
    return FileStore::open(*system_,
                           {.path = path_, .num_ranks = num_ranks, .max_bytes = max_bytes}, soon());
  }
  std::string content() { return os::read_file(path_, 1 << 26).value_or_throw(); }
  void write(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  ::cadre::testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("store");
};

TEST_F(FileStoreTest, AFileCutAnywhereHoldsTheChangesBeforeTheCutAndTakesNewOnes) {
  constexpr int kChanges = 6;
  {
    auto store = open().value_or_throw();
    for (int i = 0; i < kChanges; ++i) {
      ASSERT_TRUE(store->append("log", std::to_string(i), soon()).ok());
    }
  }
  const std::string whole = content();
  const std::string log = "012345";
  std::string longest;
  for (size_t length = 0; length <= whole.size(); ++length) {
    write(whole.substr(0, length));
    auto store = open().value_or_throw();
    ASSERT_TRUE(store->append("log", "x", soon()).ok());
    const std::string value = store->get("log", soon()).value();
    ASSERT_TRUE(value.ends_with('x')) << length;
    const std::string before = value.substr(0, value.size() - 1);
    ASSERT_EQ(before, log.substr(0, before.size())) << "cut after " << length << " bytes";
    ASSERT_GE(before.size(), longest.size());
    longest = before;
    // Another handle must read the same value from the file.
    ASSERT_EQ(open().value_or_throw()->get("log", soon()).value(), value);
  }
  EXPECT_EQ(longest, log);
}

TEST_F(FileStoreTest, DamageBeforeTheEndIsCorruptionAndNamesTheFile) {
  {
    auto store = open().value_or_throw();
    ASSERT_TRUE(store->set("a", "first value", soon()).ok());
    ASSERT_TRUE(store->set("b", "second value", soon()).ok());
  }
  std::string bytes = content();
  bytes[bytes.find("first value")] ^= 1;
  write(bytes);
  const auto refused = open();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kCorruption);
  EXPECT_NE(refused.error().message().find(path_), std::string::npos) << refused.error().message();
}

TEST_F(FileStoreTest, AFileOfAnotherKindIsRefused) {
  for (const std::string text : {"this is somebody's text and no store", "short"}) {
    write(text);
    const auto refused = open();
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_EQ(content(), text);
  }
}

TEST_F(FileStoreTest, AFolderThatIsNotThereIsNamed) {
  const auto refused = FileStore::open(*system_, {.path = folder_.file("no/such/store")}, soon());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(refused.error().message().find("no/such/store"), std::string::npos);
}

TEST_F(FileStoreTest, TheLastToLeaveRemovesTheFileAndNobodyBefore) {
  auto first = open(2).value_or_throw();
  ASSERT_TRUE(first->set("k", "v", soon()).ok());
  first.reset();
  EXPECT_TRUE(std::filesystem::exists(path_)) << "the second rank has not opened it yet";
  auto second = open(2).value_or_throw();
  EXPECT_EQ(second->get("k", soon()).value(), "v");
  auto clone = second->clone(soon()).value_or_throw();
  second.reset();
  EXPECT_TRUE(std::filesystem::exists(path_)) << "a clone still has it open";
  clone.reset();
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(FileStoreTest, OneThatHasLeftIsNotPresentBeforeItsFileIsClosed) {
  const auto join = [&] {
    auto file = os::NativeFileSystem().open_shared(path_);
    store::Journal journal(std::move(file).value_or_throw(), path_, size_t{1} << 20);
    EXPECT_TRUE(journal.try_lock().value());
    EXPECT_TRUE(journal.enter(2).ok());
    const wire::StoreRecord record{.verb = wire::StoreRecordVerb::kJoin};
    EXPECT_TRUE(journal.commit(std::span(&record, 1)).ok());
    journal.unlock();
    return journal;
  };
  store::Journal first = join();
  store::Journal last = join();
  for (store::Journal* journal : {&first, &last}) {
    EXPECT_TRUE(std::filesystem::exists(path_));
    ASSERT_TRUE(journal->try_lock().value());
    EXPECT_TRUE(journal->leave(2).ok());
    journal->unlock();
  }
  EXPECT_FALSE(std::filesystem::exists(path_))
      << "the file was removed although both ranks still have it open";
}

TEST_F(FileStoreTest, WhatAKilledJobLeftIsNotTakenForTheNextOnes) {
  // Both ranks of the first job open the store and are killed.
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      auto store = open(2).value_or_throw();
      const bool was_set = store->set("stale", "yes", soon()).ok();
      _exit(was_set ? (kill(getpid(), SIGKILL), 1) : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
  }
  auto store = open(2).value_or_throw();
  EXPECT_FALSE(store->check(std::vector<std::string>{"stale"}, soon()).value());
  EXPECT_EQ(store->num_keys(soon()).value(), 0);
}

// Three processes increment one counter, and each writes a byte to a pipe after each add(). All are
// killed at once. The counter must contain every add() that returned and at most one more of each
// process, and the file must not be locked.
TEST_F(FileStoreTest, KilledWritersLoseNothingThatReturnedAndBlockNobody) {
  constexpr int kWriters = 3;
  for (int round = 0; round < 10; ++round) {
    std::filesystem::remove(path_);
    int pipes[2];
    ASSERT_EQ(pipe(pipes), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < kWriters; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        auto store = open().value_or_throw();
        while (store->add("n", 1, soon()).ok() && ::write(pipes[1], "+", 1) == 1) {
        }
        _exit(1);
      }
      children.push_back(child);
    }
    close(pipes[1]);
    // Each round kills the processes after a different number of calls.
    int num_acknowledged = 0;
    char byte = 0;
    while (num_acknowledged < 40 + 7 * round && ::read(pipes[0], &byte, 1) == 1) ++num_acknowledged;
    for (const pid_t child : children) kill(child, SIGKILL);
    while (::read(pipes[0], &byte, 1) == 1) ++num_acknowledged;
    close(pipes[0]);
    for (const pid_t child : children) waitpid(child, nullptr, 0);
    auto store = open().value_or_throw();
    const int64_t count = store->add("n", 0, soon()).value();
    EXPECT_GE(count, num_acknowledged);
    EXPECT_LE(count, num_acknowledged + kWriters);
    EXPECT_TRUE(store->set("after", "x", soon()).ok());
  }
}

TEST_F(FileStoreTest, AWriterThatStopsHoldingTheLockIsWaitedForUntilTheDeadline) {
  auto store = open().value_or_throw();
  auto other = os::LockedFile::open(path_).value_or_throw();
  ASSERT_TRUE(other.try_lock().value());
  const Status late = store->set("k", "v", system_->deadline_in(milliseconds(50)));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(late.error().message().find(path_), std::string::npos) << late.error().message();
  EXPECT_FALSE(store->check(std::vector<std::string>{"k"}, soon()).value());
  other.unlock();
  EXPECT_TRUE(store->set("k", "v", soon()).ok());
}

TEST_F(FileStoreTest, AFullFileRefusesAndStaysReadable) {
  auto store = open(0, 2000).value_or_throw();
  ASSERT_TRUE(store->set("a", std::string(1200, 'x'), soon()).ok());
  const Status full = store->set("a", std::string(1200, 'y'), soon());
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(store->get("a", soon()).value(), std::string(1200, 'x'));
  EXPECT_TRUE(store->set("b", "small", soon()).ok());
}

TEST_F(FileStoreTest, AWriteThatTheSystemRefusesHalfWayLeavesNoTrace) {
  const pid_t child = fork();
  if (child == 0) {
    // The file may not grow beyond 1000 bytes, so the kernel writes a part of the record and then
    // returns EFBIG.
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    auto store = open().value_or_throw();
    bool holds = store->set("a", "1", soon()).ok() && setrlimit(RLIMIT_FSIZE, &limit) == 0;
    const Status refused = store->set("a", std::string(5000, 'x'), soon());
    holds = holds && !refused.ok() && refused.error().code() == ErrorCode::kUnavailable;
    holds = holds && store->get("a", soon()).value() == "1" && store->set("b", "2", soon()).ok();
    _exit(holds ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(open().value_or_throw()->get("b", soon()).value(), "2");
}

}  // namespace
}  // namespace cadre
