#include "cadre/core/os/files/durable_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/file_size_limit.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

class DurableFile : public ::testing::Test {
 protected:
  static ConstBytes bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
  NativeFileSystem files_;
};

TEST_F(DurableFile, HoldsThePiecesInOrder) {
  const std::array<ConstBytes, 3> pieces = {bytes("ab"), bytes(""), bytes("cde")};
  ASSERT_TRUE(write_file(folder_ + "/a", pieces).ok());
  EXPECT_EQ(*read_file(folder_ + "/a", 100), "abcde");
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
  ASSERT_TRUE(rename_path(files_, folder_ + "/temporary", folder_ + "/final").ok());
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/final/a"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/temporary"));
  EXPECT_FALSE(rename_path(files_, folder_ + "/missing", folder_ + "/b").ok());
}

TEST_F(DurableFile, FoldersChangePlaces) {
  for (const std::string name : {"/a", "/b"}) {
    std::filesystem::create_directory(folder_ + name);
    const std::array<ConstBytes, 1> pieces = {bytes(name)};
    ASSERT_TRUE(write_file(folder_ + name + "/x", pieces).ok());
  }
  ASSERT_TRUE(exchange_paths(files_, folder_ + "/a", folder_ + "/b").ok());
  EXPECT_EQ(*read_file(folder_ + "/a/x", 10), "/b");
  EXPECT_EQ(*read_file(folder_ + "/b/x", 10), "/a");
}

TEST_F(DurableFile, RemoveAllFollowsNoLinks) {
  std::filesystem::create_directories(folder_ + "/kept/inner");
  std::filesystem::create_directories(folder_ + "/removed");
  std::filesystem::create_directory_symlink(folder_ + "/kept", folder_ + "/removed/link");
  ASSERT_TRUE(remove_all(files_, folder_ + "/removed").ok());
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/removed"));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/kept/inner"));
}

TEST_F(DurableFile, TwoMayRemoveTheSame) {
  const std::string removed = folder_ + "/removed";
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::filesystem::create_directories(removed + "/inner");
    for (int i = 0; i < 100; ++i) {
      ASSERT_TRUE(files_.create(cadre::format("{}/inner/{}", removed, i)).ok());
    }
    Status of_other;
    const auto other =
        make_native_system()->spawn("other", [&] { of_other = remove_all(files_, removed); });
    const Status own = remove_all(files_, removed);
    other->join();
    ASSERT_TRUE(own.ok()) << own.error().message();
    ASSERT_TRUE(of_other.ok()) << of_other.error().message();
    ASSERT_FALSE(std::filesystem::exists(removed));
  }
}

TEST_F(DurableFile, AFolderBehindALinkIsThere) {
  std::filesystem::create_directory(folder_ + "/real");
  std::filesystem::create_directory_symlink(folder_ + "/real", folder_ + "/link");
  ASSERT_TRUE(make_folders(files_, folder_ + "/link/below").ok());
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/real/below"));
}

}  // namespace
}  // namespace cadre::os
