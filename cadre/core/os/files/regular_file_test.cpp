#include "cadre/core/os/files/regular_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

class RegularFileTest : public ::testing::Test {
 protected:
  ErrorCode refusal_of(const std::string& path) {
    struct stat status {};
    const auto opened = open_regular_file(path, status);
    EXPECT_FALSE(opened.ok()) << path;
    return opened.ok() ? ErrorCode::kInternal : opened.error().code();
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(RegularFileTest, AFileIsOpenedWithItsStatus) {
  std::ofstream(folder_.file("file")) << "12345";
  struct stat status {};
  const auto opened = open_regular_file(folder_.file("file"), status);
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(status.st_size, 5);
  EXPECT_EQ(identity_of(status), file_identity(folder_.file("file")).value_or_throw());
}

TEST_F(RegularFileTest, WhatIsNoFileIsRefused) {
  const std::string pipe = folder_.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(refusal_of(pipe), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal_of("/dev/null"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal_of(folder_.path()), ErrorCode::kUnavailable);
  EXPECT_EQ(refusal_of(folder_.file("missing")), ErrorCode::kUnavailable);
}

TEST_F(RegularFileTest, LinksLeadToOneFileAndACopyIsAnother) {
  namespace fs = std::filesystem;
  std::ofstream(folder_.file("file")) << "1";
  fs::create_symlink("file", folder_.path() / "symbolic");
  fs::create_hard_link(folder_.path() / "file", folder_.path() / "hard");
  fs::copy_file(folder_.path() / "file", folder_.path() / "copy");
  const FileIdentity own = file_identity(folder_.file("file")).value_or_throw();
  EXPECT_EQ(file_identity(folder_.file("symbolic")).value_or_throw(), own);
  EXPECT_EQ(file_identity(folder_.file("hard")).value_or_throw(), own);
  EXPECT_FALSE(file_identity(folder_.file("copy")).value_or_throw() == own);
  EXPECT_EQ(file_identity(folder_.file("missing")).error().code(), ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace cadre::os
