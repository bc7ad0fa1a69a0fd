#include "cadre/core/os/proc/exit_status.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <optional>

namespace cadre::os {
namespace {

// Returns the pid of a child that waits until a signal ends it.
int start_waiting_child() {
  const int pid = ::fork();
  if (pid == 0) {
    while (true) ::pause();
  }
  return pid;
}

TEST(ExitStatus, HasTheCodeOfAChildThatReturned) {
  const int pid = ::fork();
  if (pid == 0) ::_exit(7);
  const ExitStatus status = reap(pid);
  EXPECT_EQ(status, (ExitStatus{.code = 7}));
  EXPECT_EQ(status.shell_code(), 7);
  EXPECT_FALSE(status.is_success());
}

TEST(ExitStatus, HasTheSignalOfAChildThatOneEnded) {
  const int pid = start_waiting_child();
  EXPECT_EQ(try_reap(pid), std::nullopt);
  ::kill(pid, SIGKILL);
  const ExitStatus status = reap(pid);
  EXPECT_EQ(status, (ExitStatus{.signal = SIGKILL}));
  EXPECT_EQ(status.shell_code(), 137);
  EXPECT_FALSE(status.is_success());
}

TEST(ExitStatus, OfAChildThatWasReapedBeforeIsNotKnown) {
  const int pid = ::fork();
  if (pid == 0) ::_exit(0);
  EXPECT_TRUE(reap(pid).is_success());
  const ExitStatus status = reap(pid);
  EXPECT_FALSE(status.is_known);
  EXPECT_FALSE(status.is_success());
  EXPECT_EQ(status.shell_code(), 1);
}

}  // namespace
}  // namespace cadre::os
