#include "cadre/core/os/host/process_stat.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>

namespace cadre::os {
namespace {

TEST(ProcessStat, AProcessIsDescribedWhateverItsNameHas) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const int child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_NAME, ") Z 1 (");
    [[maybe_unused]] const ssize_t written = ::write(ends[1], "x", 1);
    while (true) ::pause();
  }
  char named = 0;
  ASSERT_EQ(::read(ends[0], &named, 1), 1);
  const auto stat = read_process_stat(child);
  ::kill(child, SIGKILL);
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  const auto ended = read_process_stat(child);
  ::waitpid(child, nullptr, 0);
  ::close(ends[0]);
  ::close(ends[1]);
  ASSERT_TRUE(stat.has_value());
  EXPECT_EQ(stat->pid, child);
  EXPECT_EQ(stat->name, ") Z 1 (");
  EXPECT_EQ(stat->parent_pid, ::getpid());
  EXPECT_EQ(stat->process_group, ::getpgrp());
  EXPECT_FALSE(stat->has_ended);
  ASSERT_TRUE(ended.has_value());
  EXPECT_TRUE(ended->has_ended);
  EXPECT_EQ(ended->start_time, stat->start_time);
  EXPECT_FALSE(read_process_stat(child).has_value());
}

}  // namespace
}  // namespace cadre::os
