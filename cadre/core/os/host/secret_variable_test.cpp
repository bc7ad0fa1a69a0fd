#include "cadre/core/os/host/secret_variable.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "cadre/core/os/files/file.h"
#include "cadre/testing/core/own_process.h"

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

// The next test runs this test in a process that was started with the variable.
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
  EXPECT_EQ(testing::run_disabled_test("SecretVariable.DISABLED_TakeWhatTheKernelPutThere",
                                       {"CADRE_TEST_SECRET=hidden"}),
            "");
}

}  // namespace
}  // namespace cadre::os
