#include "cadre/os/host/secret_variable.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "cadre/os/io/file.h"

namespace cadre::os {
namespace {

constexpr size_t kMaxProcBytes = 1 << 20;

TEST(SecretVariable, IsGivenAgainAndIsNoLongerInTheEnvironment) {
  EXPECT_EQ(take_secret_variable("CADRE_TEST_SECRET"), std::nullopt);
  ::setenv("CADRE_TEST_SECRET", "first", 1);
  EXPECT_EQ(take_secret_variable("CADRE_TEST_SECRET"), "first");
  EXPECT_STREQ(std::getenv("CADRE_TEST_SECRET"), "");
  EXPECT_EQ(std::system("test -z \"$CADRE_TEST_SECRET\""), 0);
  EXPECT_EQ(take_secret_variable("CADRE_TEST_SECRET"), "first");
  ::setenv("CADRE_TEST_SECRET", "second", 1);
  EXPECT_EQ(take_secret_variable("CADRE_TEST_SECRET"), "second");
  ::unsetenv("CADRE_TEST_SECRET");
  EXPECT_EQ(take_secret_variable("CADRE_TEST_SECRET"), std::nullopt);
}

// Run by the next test in a process that was started with the variable.
TEST(SecretVariable, DISABLED_TakeWhatTheKernelPutThere) {
  const auto has_secret = [] {
    const std::string all = read_file("/proc/self/environ", kMaxProcBytes).value_or_throw();
    return all.find("CADRE_TEST_SECRET=hidden") != std::string::npos;
  };
  ASSERT_TRUE(has_secret());
  EXPECT_EQ(take_secret_variable("CADRE_TEST_SECRET"), "hidden");
  EXPECT_FALSE(has_secret());
  EXPECT_STREQ(std::getenv("CADRE_TEST_SECRET"), "");
}

TEST(SecretVariable, IsOverwrittenWhereTheKernelPutIt) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(20);
    const char* arguments[] = {"test",
                               "--gtest_filter=SecretVariable.DISABLED_TakeWhatTheKernelPutThere",
                               "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr};
    const char* environment[] = {"CADRE_TEST_SECRET=hidden", nullptr};
    ::execve("/proc/self/exe", const_cast<char* const*>(arguments),
             const_cast<char* const*>(environment));
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace cadre::os
