#include "cadre/core/os/proc/executable.h"

#include <gtest/gtest.h>

namespace cadre::os {
namespace {

TEST(Executable, IsFoundAsAShellFindsIt) {
  const auto found = find_executable("sh", "/no/such/folder:/usr/bin:/bin");
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(*found, "/usr/bin/sh");
  EXPECT_EQ(find_executable("sh", "/no/such/folder").error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(find_executable("/tmp", "").error().code(), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(find_executable("", "/usr/bin").ok());
}

}  // namespace
}  // namespace cadre::os
