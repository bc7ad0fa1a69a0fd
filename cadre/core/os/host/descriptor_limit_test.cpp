#include "cadre/core/os/host/descriptor_limit.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace cadre::os {
namespace {

class DescriptorLimitTest : public ::testing::Test {
 protected:
  DescriptorLimitTest() { ::getrlimit(RLIMIT_NOFILE, &before_); }
  ~DescriptorLimitTest() override { ::setrlimit(RLIMIT_NOFILE, &before_); }

  rlimit before_{};
};

TEST_F(DescriptorLimitTest, RaisesTheSoftLimitToTheHardOne) {
  const rlimit low{.rlim_cur = 64, .rlim_max = before_.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  const DescriptorLimit expected{.soft = 64, .hard = before_.rlim_max};
  EXPECT_EQ(descriptor_limit(), expected);
  EXPECT_EQ(raise_descriptor_limit(), expected);
  EXPECT_EQ(descriptor_limit(), (DescriptorLimit{.soft = expected.hard, .hard = expected.hard}));
}

}  // namespace
}  // namespace cadre::os
