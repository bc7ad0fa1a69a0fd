// Tests how `cadre run` ends when it gets a signal, SIGKILL included: no process or file of the job
// may be left.
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

// Each worker starts a child in a session of its own. The child ignores all signals that can be
// ignored.
constexpr const char* kStubbornFamily =
    "setsid sh -c \"trap '' TERM INT HUP; echo grandchild; while true; do sleep 0.1; done\" & "
    "trap '' TERM INT; echo worker; while true; do sleep 0.1; done";

bool all_are_up(CadreCommand& command) {
  return command.wait_for("[0] grandchild") && command.wait_for("[1] grandchild") &&
         command.wait_for("[0] worker") && command.wait_for("[1] worker");
}

TEST(RunDeath, KillOfTheCommandLeavesNothing) {
  // The workers get no time to end, so that a long one does not matter.
  CadreCommand command(
      {"run", "--nproc-per-node", "2", "--shutdown-timeout", "1000", "sh", "-c", kStubbornFamily});
  ASSERT_TRUE(all_are_up(command));
  // The expected 6 processes are the launcher's guardian and supervisor, 2 workers and their 2
  // children.
  ASSERT_GE(command.marked_processes().size(), 6U);
  command.send(SIGKILL);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_EQ(result.error, "cadre: `cadre run` was killed; its workers were killed too\n");
  EXPECT_TRUE(command.leaves_nothing());
}

// Nothing of the launcher is left that could kill its workers. The kernel does.
TEST(RunDeath, WorkersEndWithBothProcessesOfTheLauncher) {
  CadreCommand command(
      shell_job(2, "trap '' TERM INT HUP; echo up; while true; do sleep 0.1; done"));
  ASSERT_TRUE(command.wait_for("[0] up") && command.wait_for("[1] up"));
  const int supervisor = command.supervisor();
  ASSERT_GT(supervisor, 0);
  ::kill(supervisor, SIGSTOP);
  command.send(SIGKILL);
  ::kill(supervisor, SIGKILL);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGKILL);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunDeath, KillOfTheSupervisorLeavesNothing) {
  CadreCommand command(shell_job(2, kStubbornFamily));
  ASSERT_TRUE(all_are_up(command));
  const int supervisor = command.supervisor();
  ASSERT_GT(supervisor, 0);
  ::kill(supervisor, SIGKILL);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_NE(result.error.find("was ended by SIGKILL; its workers were killed"), std::string::npos);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunDeath, TwoInterruptsKillAtOnce) {
  CadreCommand command(shell_job(2, kStubbornFamily));
  ASSERT_TRUE(all_are_up(command));
  command.send(SIGINT);
  ASSERT_TRUE(
      command.wait_for("SIGINT: asked 2 workers to stop, for at most 30 s; Ctrl-C again "
                       "kills them at once"));
  const auto system = os::make_native_system();
  // The pause is longer than kSameKeyPress, so that the launcher treats the next SIGINT as a second
  // Ctrl-C.
  system->poll({}, system->deadline_in(std::chrono::milliseconds(150)));
  command.send(SIGINT);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_NE(result.error.find("Ctrl-C again: killing what is left"), std::string::npos);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunDeath, TerminationLetsWorkersFinish) {
  CadreCommand command(
      shell_job(2, "trap 'echo saved; exit 0' TERM; echo up; while true; do sleep 0.05; done"));
  ASSERT_TRUE(command.wait_for("[0] up") && command.wait_for("[1] up"));
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_NE(result.output.find("[0] saved"), std::string::npos);
  EXPECT_NE(result.output.find("[1] saved"), std::string::npos);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunDeath, GraceEndsInAKill) {
  CadreCommand command({"run", "--shutdown-timeout", "1", "sh", "-c",
                        "trap '' TERM; echo up; while true; do sleep 0.05; done"});
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGTERM);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunDeath, UserSignalsAreForwardedAndStopNothing) {
  CadreCommand command(shell_job(
      1, "trap 'echo announced; done=1' USR1; echo up; until [ $done ]; do sleep 0.05; done"));
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGUSR1);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.output.find("[0] announced"), std::string::npos);
}

TEST(RunDeath, WhatNohupStartedOutlivesTheHangup) {
  const auto handler = ::signal(SIGHUP, SIG_IGN);  // the command inherits that SIGHUP is ignored
  CadreCommand command(
      shell_job(1, "trap 'done=1' USR1; echo up; until [ $done ]; do sleep 0.05; done"));
  ::signal(SIGHUP, handler);
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGHUP);
  command.send(SIGUSR1);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
}

TEST(RunDeath, WhatWorkersLeaveRunningIsStopped) {
  CadreCommand command(shell_job(1, "setsid sleep 1000 & exit 0"));
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(masked(result.error),
            "cadre: the workers have ended; stopping what they left running: sleep (pid #)\n");
  EXPECT_TRUE(command.leaves_nothing());
}

// If one of the two processes of the launcher is killed, the other one must remove the job's files.
TEST(RunDeath, TemporaryFilesGoToo) {
  const cadre::testing::TemporaryFolder temporary;
  const std::string folder = temporary.path();
  for (const bool kills_guardian : {true, false}) {
    CadreCommand command(shell_job(1, "echo up; sleep 1000"),
                         {.environment = {{"TMPDIR", folder}}});
    ASSERT_TRUE(command.wait_for("[0] up"));
    EXPECT_FALSE(std::filesystem::is_empty(folder));
    ::kill(kills_guardian ? command.pid() : command.supervisor(), SIGKILL);
    EXPECT_TRUE(command.leaves_nothing());
    EXPECT_TRUE(std::filesystem::is_empty(folder)) << kills_guardian;
  }
}

}  // namespace
}  // namespace cadre::cli
