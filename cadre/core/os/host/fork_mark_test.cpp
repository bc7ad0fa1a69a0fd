#include "cadre/core/os/host/fork_mark.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace cadre::os {
namespace {

// Exit codes of a child process. They tell its parent what the mark returned in the child, or in a
// child of the child.
enum Verdict : int { kAtHome = 10, kInChild = 11 };

int verdict_of_descendant(const ForkMark& mark, int num_forks) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int verdict = num_forks > 1        ? verdict_of_descendant(mark, num_forks - 1)
                        : mark.is_in_child() ? kInChild
                                             : kAtHome;
    ::_exit(verdict);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkMark, ChildrenAndGrandchildrenAreToldFromTheirParent) {
  const ForkMark mark;
  EXPECT_FALSE(mark.is_in_child());
  EXPECT_EQ(verdict_of_descendant(mark, 1), kInChild);
  EXPECT_EQ(verdict_of_descendant(mark, 2), kInChild);
  EXPECT_FALSE(mark.is_in_child());
}

}  // namespace
}  // namespace cadre::os
