#include "cadre/os/files/durable_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <string_view>

#include "cadre/os/files/file.h"
#include "cadre/os/files/read_only_file.h"
#include "cadre/testing/file_size_limit.h"
#include "cadre/testing/temporary_folder.h"

namespace cadre::os {
namespace {

class DurableFile : public ::testing::Test {
 protected:
  static ConstBytes bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(DurableFile, HoldsThePiecesInOrder) {
  const std::array<ConstBytes, 3> pieces = {bytes("ab"), bytes(""), bytes("cde")};
  ASSERT_TRUE(write_file(folder_ + "/a", pieces).ok());
  EXPECT_EQ(*read_file(folder_ + "/a", 100), "abcde");
  const auto mapped = ReadOnlyFile::open(folder_ + "/a");
  ASSERT_TRUE(mapped.ok());
  EXPECT_EQ(mapped->bytes().size(), 5u);
  EXPECT_EQ(mapped->bytes()[4], std::byte{'e'});
}

TEST_F(DurableFile, AFailedWriteLeavesNothing) {
  const std::array<ConstBytes, 1> pieces = {bytes("more than four bytes")};
  Status status;
  {
    const testing::FileSizeLimit limit(4);
    status = write_file(folder_ + "/a", pieces);
  }
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(status.error().message(), ::testing::HasSubstr("write " + folder_ + "/a"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/a"));
}

TEST_F(DurableFile, AFolderAppearsAtOnce) {
  const std::array<ConstBytes, 1> pieces = {bytes("x")};
  std::filesystem::create_directory(folder_ + "/temporary");
  ASSERT_TRUE(write_file(folder_ + "/temporary/a", pieces).ok());
  ASSERT_TRUE(rename_path(folder_ + "/temporary", folder_ + "/final").ok());
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/final/a"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/temporary"));
  EXPECT_FALSE(rename_path(folder_ + "/missing", folder_ + "/b").ok());
}

TEST_F(DurableFile, FoldersChangePlaces) {
  for (const std::string name : {"/a", "/b"}) {
    std::filesystem::create_directory(folder_ + name);
    const std::array<ConstBytes, 1> pieces = {bytes(name)};
    ASSERT_TRUE(write_file(folder_ + name + "/x", pieces).ok());
  }
  ASSERT_TRUE(exchange_paths(folder_ + "/a", folder_ + "/b").ok());
  EXPECT_EQ(*read_file(folder_ + "/a/x", 10), "/b");
  EXPECT_EQ(*read_file(folder_ + "/b/x", 10), "/a");
}

TEST_F(DurableFile, MappingNamesWhatItCannotOpen) {
  EXPECT_THAT(ReadOnlyFile::open(folder_ + "/none").error().message(),
              ::testing::HasSubstr(folder_ + "/none"));
  EXPECT_FALSE(ReadOnlyFile::open(folder_).ok());
  ASSERT_TRUE(write_file(folder_ + "/empty", {}).ok());
  EXPECT_EQ(ReadOnlyFile::open(folder_ + "/empty")->bytes().size(), 0u);
}

}  // namespace
}  // namespace cadre::os
