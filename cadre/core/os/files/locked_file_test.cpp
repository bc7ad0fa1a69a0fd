// Tests two handles of one file: which of them may write, whether each sees the other one as
// present, and what each reads.
#include "cadre/core/os/files/locked_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

class LockedFileTest : public ::testing::Test {
 protected:
  static Status append(LockedFile& file, size_t offset, std::string_view text) {
    return file.append_at(offset, std::as_bytes(std::span(text)));
  }
  static std::string read(const LockedFile& file, size_t offset) {
    std::array<std::byte, 64> buffer{};
    const size_t size = file.read_at(offset, buffer).value_or_throw();
    return {reinterpret_cast<const char*>(buffer.data()), size};
  }

  testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("shared");
  LockedFile first_ = LockedFile::open(path_).value_or_throw();
  LockedFile second_ = LockedFile::open(path_).value_or_throw();
};

TEST_F(LockedFileTest, IsItsOwnersAlone) {
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
}

TEST_F(LockedFileTest, OneHandleHasTheRightToWrite) {
  EXPECT_TRUE(first_.try_lock().value_or_throw());
  EXPECT_FALSE(second_.try_lock().value_or_throw());
  first_.unlock();
  EXPECT_TRUE(second_.try_lock().value_or_throw());
  EXPECT_FALSE(first_.try_lock().value_or_throw());
}

TEST_F(LockedFileTest, AHandleIsAloneUntilAnotherIsPresent) {
  ASSERT_TRUE(first_.enter().ok());
  EXPECT_TRUE(first_.is_alone().value_or_throw());
  ASSERT_TRUE(second_.enter().ok());
  EXPECT_FALSE(first_.is_alone().value_or_throw());
  EXPECT_FALSE(second_.is_alone().value_or_throw());
  second_.leave();
  EXPECT_TRUE(first_.is_alone().value_or_throw());
}

TEST_F(LockedFileTest, WhatOneAppendsTheOtherReads) {
  ASSERT_TRUE(append(first_, 0, "abc").ok());
  ASSERT_TRUE(append(second_, 3, "de").ok());
  EXPECT_EQ(read(first_, 0), "abcde");
  EXPECT_EQ(read(first_, 4), "e");
  EXPECT_EQ(read(first_, 9), "");
  ASSERT_TRUE(first_.truncate(2).ok());
  EXPECT_EQ(second_.size().value_or_throw(), 2U);
}

TEST_F(LockedFileTest, AFileThatWasRemovedOrReplacedIsNoLongerNamed) {
  EXPECT_TRUE(first_.is_named());
  ASSERT_TRUE(second_.remove().ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(first_.is_named());
  const LockedFile other = LockedFile::open(path_).value_or_throw();
  EXPECT_TRUE(other.is_named());
  EXPECT_FALSE(first_.is_named());
}

}  // namespace
}  // namespace cadre::os
