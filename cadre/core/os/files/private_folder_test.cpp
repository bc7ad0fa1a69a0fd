#include "cadre/core/os/files/private_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

mode_t mode_of(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

TEST(PrivateFolder, TheLastFolderOfThePathIsItsUsersAlone) {
  const testing::TemporaryFolder parent;
  for (const std::string& path : {parent.file("a/b"), parent.file("c/d/")}) {
    ASSERT_TRUE(make_private_folder(path).ok()) << path;
    EXPECT_EQ(mode_of(path), 0700U) << path;
  }
}

TEST(PrivateFolder, AFolderThatExistsKeepsItsMode) {
  const testing::TemporaryFolder parent;
  const std::string path = parent.file("open");
  ASSERT_EQ(::mkdir(path.c_str(), 0755), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  EXPECT_TRUE(make_private_folder(path).ok());
  EXPECT_EQ(mode_of(path), 0755U);
}

TEST(PrivateFolder, AFileInThePathIsNamed) {
  const testing::TemporaryFolder parent;
  std::ofstream(parent.file("plain")) << "x";
  for (const std::string& path : {parent.file("plain"), parent.file("plain/below")}) {
    const Status status = make_private_folder(path);
    ASSERT_FALSE(status.ok()) << path;
    EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
    EXPECT_TRUE(status.error().message().starts_with("create the folder " + path + ": "))
        << status.error().message();
  }
}

}  // namespace
}  // namespace cadre::os
