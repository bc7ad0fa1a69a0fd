#include "cadre/core/os/files/folder_space.h"

#include <gtest/gtest.h>

#include <fstream>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

TEST(FolderSpace, DescribesTheFileSystem) {
  const testing::TemporaryFolder folder;
  const auto space = read_folder_space(folder.path()).value_or_throw();
  EXPECT_GT(space.total_bytes, 0U);
  EXPECT_LE(space.free_bytes, space.total_bytes);
  EXPECT_LE(space.free_files, space.total_files);
  EXPECT_TRUE(space.is_writable);
  EXPECT_FALSE(space.file_system.empty());
}

TEST(FolderSpace, NeedsAFolder) {
  const testing::TemporaryFolder folder;
  EXPECT_EQ(read_folder_space(folder.file("none")).error().code(), ErrorCode::kUnavailable);
  std::ofstream(folder.file("file")) << "";
  EXPECT_EQ(read_folder_space(folder.file("file")).error().code(), ErrorCode::kInvalidArgument);
}

TEST(FolderSpace, KnowsTheFileSystemsOfTheKernel) {
  const auto proc = read_folder_space("/proc").value_or_throw();
  EXPECT_EQ(proc.file_system, "0x9fa0");
  EXPECT_EQ(proc.total_bytes, 0U);
  EXPECT_FALSE(proc.is_shared);
}

}  // namespace
}  // namespace cadre::os
