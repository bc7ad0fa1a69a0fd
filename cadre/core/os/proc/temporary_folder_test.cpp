#include "cadre/core/os/proc/temporary_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <memory>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

TEST(TemporaryFolder, IsItsUsersWhateverTheUmask) {
  const mode_t before = ::umask(0777);
  const testing::TemporaryFolder parent;
  ::chmod(parent.path().c_str(), S_IRWXU);
  const auto folder = TemporaryFolder::make(parent.path(), "job-");
  ::umask(before);
  ASSERT_TRUE(folder.ok());
  struct stat info {};
  ASSERT_EQ(::stat((*folder)->path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700U);
}

TEST(TemporaryFolder, HasAnAbsolutePath) {
  const auto folder = TemporaryFolder::make(".", "job-");
  ASSERT_TRUE(folder.ok()) << folder.error().message();
  EXPECT_TRUE((*folder)->path().starts_with('/')) << (*folder)->path();
}

TEST(TemporaryFolder, IsRemovedWithItsContent) {
  const testing::TemporaryFolder parent;
  std::string path;
  {
    const auto folder = TemporaryFolder::make(parent.path(), "job-").value_or_throw();
    path = folder->path();
    EXPECT_TRUE(path.starts_with(parent.path().string() + "/job-")) << path;
    std::filesystem::create_directories(path + "/a/b");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace cadre::os
