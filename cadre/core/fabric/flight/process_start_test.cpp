#include "cadre/core/fabric/flight/process_start.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cadre/core/os/host/host_info.h"

namespace cadre {
namespace {

TEST(ProcessStart, IsTheSameEachTimeAndNotBeforeTheParents) {
  const uint64_t own = process_start_of(::getpid());
  EXPECT_NE(own, 0U);
  EXPECT_EQ(process_start_of(::getpid()), own);
  EXPECT_LE(process_start_of(::getppid()), own);
}

TEST(ProcessStart, AStoppedProcessLivesAndOneThatEndedDoesNot) {
  const int child = ::fork();
  if (child == 0) {
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  FlightIdentity writer{"world", os::read_host_info().name, 0, 2, child, 0};
  writer.process_start = process_start_of(child);
  EXPECT_NE(writer.process_start, 0U);
  EXPECT_TRUE(writer_lives(writer));
  ::kill(child, SIGKILL);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(writer_lives(writer)) << "a zombie does not count as alive";
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_FALSE(writer_lives(writer));
}

}  // namespace
}  // namespace cadre
