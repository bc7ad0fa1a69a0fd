#include "cadre/core/fabric/fork_guard.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

TEST(ForkGuard, AGroupIsRefusedInAForkedChildAlone) {
  const ForkGuard guard("world", 2, 4711, std::make_shared<os::ForkMark>());
  guard.check();
  EXPECT_FALSE(guard.is_in_child());
  const int child = ::fork();
  if (child == 0) {
    const std::string failure = testing::failure_of([&] { guard.check(); });
    const bool is_right =
        guard.is_in_child() && failure.starts_with(
                                   "kInvalidArgument: group \"world\" belongs to rank "
                                   "2, pid 4711, from which this process was forked");
    ::_exit(is_right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  guard.check();
}

}  // namespace
}  // namespace cadre
