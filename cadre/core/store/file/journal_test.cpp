// Tests the journal: the file of a store and the table of keys that its records produce. Two
// handles have the same file open.
#include "cadre/core/store/file/journal.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/os/files/locked_file.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::store {
namespace {

using wire::StoreRecord;
using wire::StoreRecordVerb;

class JournalTest : public ::testing::Test {
 protected:
  std::unique_ptr<Journal> open(size_t max_bytes = 1 << 20) {
    auto file = std::make_unique<os::LockedFile>(os::LockedFile::open(path_).value_or_throw());
    auto journal = std::make_unique<Journal>(std::move(file), path_, max_bytes);
    locked(*journal, [&] { return journal->enter(0); }).value_or_throw();
    return journal;
  }
  template <typename Body>
  static Status locked(Journal& journal, Body body) {
    EXPECT_TRUE(journal.try_lock().value_or_throw());
    const Status status = body();
    journal.unlock();
    return status;
  }
  static Status set(Journal& journal, const std::string& key, const std::string& value) {
    return locked(journal, [&]() -> Status {
      CADRE_RETURN_IF_ERROR(journal.refresh_for_change());
      CADRE_RETURN_IF_ERROR(journal.table().set(key, value));
      const StoreRecord record{.verb = StoreRecordVerb::kSet, .key = key, .value = value};
      return journal.commit(std::span(&record, 1));
    });
  }
  static std::string value_of(Journal& journal, const std::string& key) {
    journal.refresh().value_or_throw();
    const std::string* value = journal.table().find(key);
    return value == nullptr ? "absent" : *value;
  }

  testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("store");
};

TEST_F(JournalTest, TheTableFollowsWhatAnotherHandleAppends) {
  const auto writer = open();
  const auto reader = open();
  EXPECT_EQ(value_of(*reader, "k"), "absent");
  ASSERT_TRUE(set(*writer, "k", "1").ok());
  EXPECT_EQ(value_of(*reader, "k"), "1");
  ASSERT_TRUE(set(*reader, "k", "2").ok());
  EXPECT_EQ(value_of(*writer, "k"), "2");
}

TEST_F(JournalTest, OneHandleHasTheLock) {
  const auto first = open();
  const auto second = open();
  ASSERT_TRUE(first->try_lock().value_or_throw());
  EXPECT_FALSE(second->try_lock().value_or_throw());
  first->unlock();
  EXPECT_TRUE(second->try_lock().value_or_throw());
  second->unlock();
}

TEST_F(JournalTest, ATornEndIsIgnoredByReadersAndCutOffByTheNextWriter) {
  const auto journal = open();
  ASSERT_TRUE(set(*journal, "k", "1").ok());
  const auto size = std::filesystem::file_size(path_);
  const auto record =
      wire::encode(StoreRecord{.verb = StoreRecordVerb::kSet, .key = "k", .value = "torn"});
  std::ofstream(path_, std::ios::binary | std::ios::app)
      .write(reinterpret_cast<const char*>(record.data()),
             static_cast<std::streamsize>(record.size() - 1));
  EXPECT_EQ(value_of(*journal, "k"), "1");
  EXPECT_EQ(std::filesystem::file_size(path_), size + record.size() - 1);
  ASSERT_TRUE(locked(*journal, [&] { return journal->refresh_for_change(); }).ok());
  EXPECT_EQ(std::filesystem::file_size(path_), size);
  ASSERT_TRUE(set(*journal, "k", "2").ok());
  EXPECT_EQ(value_of(*open(), "k"), "2");
}

TEST_F(JournalTest, AChangeThatWasNotCommittedIsForgotten) {
  const auto journal = open();
  ASSERT_TRUE(set(*journal, "k", "1").ok());
  ASSERT_TRUE(journal->table().set("k", "not committed").ok());
  journal->forget();
  EXPECT_EQ(value_of(*journal, "k"), "1");
}

TEST_F(JournalTest, AFullFileRefusesARecordAndKeepsTheOthers) {
  const auto journal = open(1000);
  ASSERT_TRUE(set(*journal, "k", "1").ok());
  EXPECT_EQ(set(*journal, "k", std::string(2000, 'x')).error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(value_of(*journal, "k"), "1");
}

}  // namespace
}  // namespace cadre::store
