// Tests signals that arrive at any instant of `cadre run`, and workers that are stopped (SIGSTOP)
// and continued (SIGCONT).
#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <vector>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

// Returns the state of a process as in proc(5); 'T' means that a signal has stopped it.
char state_of(int pid) {
  std::ifstream file(cadre::format("/proc/{}/stat", pid));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t close = text.rfind(')');
  return close == std::string::npos || close + 2 >= text.size() ? '?' : text[close + 2];
}

bool becomes_true(const std::function<bool()>& is_true) {
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(kPatience);
  while (!is_true()) {
    if (deadline.has_passed(system->now())) return false;
    system->poll({}, system->deadline_in(std::chrono::milliseconds(5)));
  }
  return true;
}

// Returns the pid that a worker has written after the mark, as in "[1] up 4711".
int pid_after(const std::string& text, const std::string& mark) {
  const size_t at = text.find(mark);
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + mark.size());
}

// ThreadSanitizer makes a file of its own in the folder, and removes it, before main() begins. That
// file must not be counted.
std::vector<std::string> left_behind_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("tsan.rodata.")) names.push_back(name);
  }
  return names;
}

// The signal to `cadre run` may arrive before the workers start, while they are being started, or
// after they have ended.
TEST(RunStop, ASignalAtAnyInstantLeavesNoFileAndNoPuzzle) {
  const cadre::testing::TemporaryFolder temporary;
  const auto system = os::make_native_system();
  constexpr int kLaunches = 100;
  Duration delay{};
  for (int launch = 0; launch < kLaunches; ++launch) {
    const TimePoint start = system->now();
    CadreCommand command({"run", "--nproc-per-node", "2", "true"},
                         {.environment = {{"TMPDIR", temporary.path()}}});
    system->poll({}, Deadline(start + delay));
    command.send(SIGTERM);
    const auto result = command.wait();
    // The delay grows until the launch ends before the signal, and then stays near that value.
    delay = result.exit_code == 0 ? delay * 3 / 4 : delay + std::chrono::milliseconds(1);
    EXPECT_TRUE(result.exit_code == 0 || result.exit_code == 128 + SIGTERM) << result.exit_code;
    EXPECT_EQ(result.error.find("launcher's own process"), std::string::npos) << result.error;
    EXPECT_TRUE(command.leaves_nothing());
    ASSERT_THAT(left_behind_in(temporary.path()), ::testing::IsEmpty()) << "launch " << launch;
  }
}

TEST(RunStop, AStoppedWorkerIsContinuedToEndAndNamedInTheReport) {
  CadreCommand command({"run", "--nproc-per-node", "2", "--shutdown-timeout", "1000", "sh", "-c",
                        "if [ $RANK = 1 ]; then kill -STOP $$; fi; sleep 1; exit 3"});
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(
      masked(result.error)
          .starts_with("cadre: rank 1 (pid #) was stopped by SIGSTOP and does not run until "
                       "it is continued (kill -CONT "))
      << result.error;
  EXPECT_TRUE(
      result.error.ends_with("  likely cause: rank 1 was stopped by SIGSTOP when rank 0 "
                             "failed\n"))
      << result.error;
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunStop, WhatWasContinuedInTimeIsNoCause) {
  CadreCommand command(shell_job(2, "echo up $$; until [ -e /proc/$$/gone ]; do sleep 0.05; done"));
  ASSERT_TRUE(command.wait_for("[0] up") && command.wait_for("[1] up"));
  const int worker = pid_after(command.seen().output, "[1] up ");
  ASSERT_GT(worker, 0);
  ::kill(worker, SIGSTOP);
  ASSERT_TRUE(command.wait_for("rank 1 (pid"));
  ::kill(worker, SIGCONT);
  ASSERT_TRUE(becomes_true([&] { return state_of(worker) != 'T'; }));
  ::kill(pid_after(command.seen().output, "[0] up "), SIGKILL);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_EQ(result.error.find("likely cause"), std::string::npos) << result.error;
}

// One of the shells leaves the process group of the worker.
TEST(RunStop, SIGCONTIsNotSentToProcessesThatRun) {
  const std::string shell =
      "trap 'echo continued' CONT; trap 'asked=1' TERM; echo $0 is up; until [ \"$asked\" ]; do "
      "sleep "
      "0.02; done; sleep 0.3; echo done";
  CadreCommand command({"run", "--shutdown-timeout", "1000", "sh", "-c",
                        "setsid sh -c \"$1\" child & eval \"$1\"", "worker", shell});
  ASSERT_TRUE(command.wait_for("child is up") && command.wait_for("worker is up"));
  ::kill(command.supervisor(), SIGCONT);
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(count_of(result.output, "[0] done\n"), 2u) << result.output << result.error;
  EXPECT_EQ(count_of(result.output, "continued"), 0u) << result.output;
  EXPECT_TRUE(command.leaves_nothing());
}

// Two children of the worker stop themselves. One of them has left its process group.
TEST(RunStop, StoppedChildrenOfWorkersAreContinuedToEnd) {
  const std::string shell =
      "trap 'echo ended; exit' TERM; echo $0 $$; kill -STOP $$; while true; do sleep 0.02; done";
  CadreCommand command({"run", "--shutdown-timeout", "1000", "sh", "-c",
                        "sh -c \"$1\" one & setsid sh -c \"$1\" two & wait", "sh", shell});
  for (const char* mark : {"[0] one ", "[0] two "}) {
    ASSERT_TRUE(command.wait_for(mark));
    const int pid = pid_after(command.seen().output, mark);
    EXPECT_TRUE(becomes_true([&] { return state_of(pid) == 'T'; })) << mark;
  }
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(count_of(result.output, "[0] ended\n"), 2u) << result.output << result.error;
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunStop, CtrlZStopsTheWholeJobAndContinuingContinuesIt) {
  // The shells start no further process after "up", because a shell that waits in vfork() for a
  // stopped child has the state D instead of T. The job ends only after the `sleep` processes that
  // the shells have started.
  CadreCommand command({"run", "--nproc-per-node", "2", "--shutdown-timeout", "1", "sh", "-c",
                        "setsid sleep 1000 & echo up $$ below $!; wait"});
  ASSERT_TRUE(command.wait_for("[0] up") && command.wait_for("[1] up"));
  const std::string& output = command.seen().output;
  std::vector<int> pids{command.pid()};
  for (const char* mark : {"[0] up ", "[1] up "}) pids.push_back(pid_after(output, mark));
  pids.push_back(pid_after(output, " below "));

  command.send(SIGTSTP);
  for (const int pid : pids) {
    EXPECT_TRUE(becomes_true([&] { return state_of(pid) == 'T'; })) << pid << state_of(pid);
  }
  command.send(SIGCONT);
  for (const int pid : pids) {
    EXPECT_TRUE(becomes_true([&] { return state_of(pid) != 'T'; })) << pid;
  }
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_EQ(result.error.find("was stopped by"), std::string::npos) << result.error;
  EXPECT_TRUE(command.leaves_nothing());
}

// The tests below set a shutdown timeout that is longer than their own deadline, unless it must
// expire.
TEST(RunStop, WhatAFailedWorkerLeftRunningIsAskedToStop) {
  CadreCommand command({"run", "--shutdown-timeout", "1000", "sh", "-c",
                        "sleep 1000 & setsid sleep 1000 & echo started; exit 3"});
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 3) << result.error;
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunStop, WhatAnInterruptedWorkerLeavesRunningIsAskedToStop) {
  CadreCommand command({"run", "--shutdown-timeout", "1000", "sh", "-c",
                        "setsid sleep 1000 & trap 'exit 0' TERM; echo up; while true; do sleep "
                        "0.05; done"});
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGTERM);
  EXPECT_EQ(command.wait().exit_code, 128 + SIGTERM);
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunStop, SaysForWhomItWaitsAndWhomItHadToKill) {
  CadreCommand command({"run", "--nproc-per-node", "2", "--shutdown-timeout", "3", "sh", "-c",
                        "if [ $RANK = 1 ]; then sleep 0.5; exit 5; fi; trap '' TERM; while true; "
                        "do sleep 0.1; done"});
  ASSERT_TRUE(command.wait_for("waiting for"));
  EXPECT_NE(command.seen().error.find("cadre: rank 1 failed with exit code 5; waiting for rank 0 "
                                      "to end, killed if not within 3 s of SIGTERM"),
            std::string::npos)
      << command.seen().error;
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 5);
  EXPECT_NE(result.error.find("  others: rank 0: killed, because it did not end within 3 s of "
                              "SIGTERM"),
            std::string::npos)
      << result.error;
  EXPECT_TRUE(command.leaves_nothing());
}

// A failed worker leaves a process running that ignores SIGTERM.
CadreCommand job_with_deaf_leftover(const std::string& shutdown_timeout) {
  return CadreCommand(
      {"run", "--shutdown-timeout", shutdown_timeout, "sh", "-c",
       "dir=$(mktemp -d); setsid sh -c \"trap '' TERM; touch $dir/deaf; while true; do sleep 0.1; "
       "done\" & until [ -e $dir/deaf ]; do sleep 0.05; done; rm -r $dir; exit 4"});
}

TEST(RunStop, ALeftoverThatIsAwaitedIsNamed) {
  CadreCommand command = job_with_deaf_leftover("1000");
  EXPECT_TRUE(command.wait_for("waiting for sh (pid")) << command.seen().error;
  command.send(SIGINT);
  command.wait();
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunStop, ALeftoverThatHadToBeKilledIsNamed) {
  CadreCommand command = job_with_deaf_leftover("1");
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_NE(masked(result.error).find("did not end within 1 s of SIGTERM: sh (pid #)"),
            std::string::npos)
      << result.error;
  EXPECT_TRUE(command.leaves_nothing());
}

// The worker ignores SIGTERM, so it must have got the chosen signal.
TEST(RunStop, AChosenSignalStopsTheJobAndIsTheOneThatWorkersGet) {
  CadreCommand command(
      {"run", "--shutdown-timeout", "1000", "--signals-to-handle", "SIGTERM,SIGUSR1", "sh", "-c",
       "trap '' TERM; trap 'echo got it; exit 0' USR1; echo up; while true; do sleep 0.05; done"});
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGUSR1);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGUSR1);
  EXPECT_NE(result.output.find("[0] got it"), std::string::npos) << result.output;
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunStop, AStoppingSignalThatIsNotChosenKillsTheJobAtOnce) {
  CadreCommand command({"run", "--shutdown-timeout", "1000", "--max-restarts", "3",
                        "--signals-to-handle", "SIGUSR1", "sh", "-c",
                        "trap '' TERM; echo up; while true; do sleep 0.05; done"});
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_EQ(result.error,
            "cadre: SIGTERM, which --signals-to-handle does not name: killing the workers\n");
  EXPECT_TRUE(command.leaves_nothing());
}

}  // namespace
}  // namespace cadre::cli
