#include "cadre/core/os/files/native_file_system.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "cadre/core/os/io/fd.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

using ::testing::HasSubstr;

// If the path is a pipe, opening must not wait for it, and the pipe must not be removed.
TEST(NativeFileSystemTest, APipeIsRefusedAndStays) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.file("pipe");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const Fd reader(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  NativeFileSystem files;
  const auto created = files.create(path);
  ASSERT_FALSE(created.ok());
  EXPECT_THAT(created.error().message(), HasSubstr("a pipe, a socket or a device has this name"));
  struct stat info {};
  EXPECT_EQ(::stat(path.c_str(), &info), 0);
}

}  // namespace
}  // namespace cadre::os
