// Tests `cadre run --max-restarts`: after which failures all workers are started again, and what
// ends the job instead.
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cadre/core/comm/connect.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/core/os/proc/fork/fork_server.h"
#include "cadre/core/os/proc/fork/prepare_restart.h"
#include "cadre/core/rendezvous/environment_rendezvous.h"
#include "cadre/launch/cli/binding/core_binding.h"
#include "cadre/launch/job/failure_report.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/reserved_port.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

std::vector<std::string> restarted_job(int max_restarts, std::vector<std::string> rest) {
  rest.insert(rest.begin(), {"run", "--max-restarts", cadre::format("{}", max_restarts)});
  return rest;
}

std::vector<std::string> restarted_shells(int max_restarts, int num_workers, std::string script) {
  return restarted_job(max_restarts, {"--nproc-per-node", cadre::format("{}", num_workers), "sh",
                                      "-c", std::move(script)});
}

TEST(RunRestart, StartsAllRanksAgainAndSaysWhy) {
  const auto result = run_cadre(restarted_shells(
      2, 2,
      "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then [ $RANK = 0 ] || exit 3; sleep 50; fi; "
      "echo rank $RANK of $WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT of "
      "$TORCHELASTIC_MAX_RESTARTS"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("[0] rank 0 of 2, restart 1 of 2\n"));
  EXPECT_THAT(result.output, HasSubstr("[1] rank 1 of 2, restart 1 of 2\n"));
  EXPECT_EQ(masked(result.error),
            "cadre: rank 1 wrote nothing\n"
            "cadre: rank 1 of 2 failed with exit code 3 on HOST, pid #, after # s\n"
            "  others: rank 0: stopped by cadre because rank 1 failed\n"
            "cadre: restart 1 of 2: starting 2 workers again\n"
            "cadre: succeeded after 1 restart; earlier failures: rank 1: exit code 3 after # s\n");
}

TEST(RunRestart, StartsRanksAgainThatHadSucceeded) {
  const cadre::testing::TemporaryFolder folder;
  const auto result = run_cadre(restarted_shells(
      1, 2,
      "[ $RANK = 1 ] || echo start >>" + folder.file("starts") +
          "; [ $TORCHELASTIC_RESTART_COUNT != 0 ] || [ $RANK = 0 ] || { until [ -s " +
          folder.file("starts") + " ]; do sleep 0.01; done; sleep 0.1; kill -KILL $$; }"));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  std::ifstream starts(folder.file("starts"));
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(starts), {}), "start\nstart\n");
  EXPECT_THAT(result.error, HasSubstr("rank 1: signal 9 (SIGKILL) after"));
}

TEST(RunRestart, WithoutARestartLeftFailsWithTheLastFailure) {
  const auto result = run_cadre(restarted_shells(2, 1, "exit $((3 + TORCHELASTIC_RESTART_COUNT))"));
  EXPECT_EQ(result.exit_code, 5);
  const std::string error = masked(result.error);
  EXPECT_THAT(error, HasSubstr("cadre: restart 1 of 2: starting 1 worker again\n"));
  EXPECT_THAT(error, HasSubstr("cadre: restart 2 of 2: starting 1 worker again in 0.1 s\n"));
  EXPECT_THAT(error, EndsWith("cadre: failed after 2 restarts; earlier failures: rank 0: exit code "
                              "3 after # s; rank 0: exit code 4 after # s\n"
                              "cadre: rank 0 wrote nothing\n"
                              "cadre: rank 0 of 1 failed with exit code 5 on HOST, pid #, after # "
                              "s\n"));
}

TEST(RunRestart, AReportHasTheExceptionOfItsOwnAttempt) {
  const auto result = run_cadre(restarted_shells(
      1, 1,
      R"([ $TORCHELASTIC_RESTART_COUNT = 1 ] || echo '{"message": "odd"}' >$TORCHELASTIC_ERROR_FILE
         exit 1)"));
  EXPECT_EQ(result.exit_code, 1);
  const size_t first = result.error.find("  exception: odd\n");
  ASSERT_NE(first, std::string::npos) << result.error;
  EXPECT_EQ(result.error.find("exception", first + 3), std::string::npos) << result.error;
}

TEST(RunRestart, ThePrefixOfALineMayNameTheAttempt) {
  const auto result =
      run_cadre(restarted_job(1, {"--log-line-prefix-template", "${restart_count}/${rank}: ", "sh",
                                  "-c", "echo up; exit $((1 - TORCHELASTIC_RESTART_COUNT))"}));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "0/0: up\n1/0: up\n");
}

TEST(RunRestart, WhatAnAttemptLeftRunningEndsBeforeTheNextOne) {
  const cadre::testing::TemporaryFolder folder;
  const std::string pid = folder.file("pid");
  CadreCommand command(restarted_shells(
      1, 1,
      "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then setsid sleep 1000 & echo $! >" + pid +
          "; exit 3; fi; if kill -0 $(cat " + pid + "); then echo alive; else echo gone; fi"));
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[0] gone\n"));
  EXPECT_TRUE(command.leaves_nothing());
}

// The tests named RunRestartWorker are programs that the tests below start as workers. They do
// nothing when they are run directly.
TEST(RunRestartWorker, FindsNoKeyOfAnEarlierAttempt) {
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(kPatience);
  const JobEnvironment environment = read_job_environment().value_or_throw();
  if (!environment.is_launched) return;
  EnvironmentRendezvous rendezvous(*system, environment);
  const Membership membership = rendezvous.join(deadline).value_or_throw();
  const std::vector<std::string> key{cadre::format("of rank {}", membership.rank)};
  EXPECT_FALSE(membership.store->check(key, deadline).value_or_throw());
  membership.store->set(key.front(), "here", deadline).value_or_throw();
  if (environment.restart_count == 0 && membership.rank == 1) ::kill(::getpid(), SIGKILL);
}

TEST(RunRestartWorker, ConnectsAGroup) {
  const auto system = os::make_native_system();
  const JobEnvironment environment = read_job_environment().value_or_throw();
  if (!environment.is_launched) return;
  const auto world = connect_from_environment(*system, {}, system->deadline_in(kPatience));
  EXPECT_EQ(world->world_size(), 3);
  if (environment.restart_count == 0 && world->rank() == 2) ::kill(::getpid(), SIGKILL);
  world->barrier();
  world->close(system->deadline_in(kPatience));
}

// The numbers of the cores on which this process may run, as text.
std::string own_cores() {
  cpu_set_t own;
  CPU_ZERO(&own);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(own), &own), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &own)) cores.push_back(core);
  }
  return launch::rank_ranges(cores);
}

// The last rank kills itself in the first attempt. In later attempts all ranks wait for a signal if
// CADRE_TEST_WAITS is set.
TEST(RunRestartWorker, PreparesRestarts) {
  const int executed = ::getpid();
  prepare_restart();
  const auto system = os::make_native_system();
  const JobEnvironment environment = read_job_environment().value_or_throw();
  if (!environment.is_launched) return;
  const auto world = connect_from_environment(*system, {}, system->deadline_in(kPatience));
  EXPECT_EQ(world->world_size(), std::atoi(std::getenv("LOCAL_WORLD_SIZE")));
  EXPECT_EQ(world->rank(), std::atoi(std::getenv("LOCAL_RANK")));
  EXPECT_EQ(std::getenv(os::ForkServer::kVariable), nullptr);
  std::printf("restart %d %s\n", environment.restart_count,
              ::getpid() == executed ? "executed" : "forked");
  std::printf("restart %d on cores %s\n", environment.restart_count, own_cores().c_str());
  std::fflush(stdout);
  const bool is_last = world->rank() + 1 == world->world_size();
  if (environment.restart_count == 0 && is_last) ::kill(::getpid(), SIGKILL);
  world->barrier();
  if (std::getenv("CADRE_TEST_WAITS")) system->poll({}, system->deadline_in(kPatience));
  world->close(system->deadline_in(kPatience));
}

CommandResult run_workers(std::vector<std::string> options, const std::string& test) {
  options.insert(options.end(), {os::own_executable().value_or_throw(), "--gtest_brief=1",
                                 "--gtest_filter=RunRestartWorker." + test});
  return run_cadre(restarted_job(1, std::move(options)));
}

// The store of each attempt must listen on the port of --master-port.
TEST(RunRestart, EachAttemptHasAStoreOfItsOwn) {
  const testing::ReservedPort port;
  const auto result = run_workers({"--nproc-per-node", "2", "--master-port", port.text()},
                                  "FindsNoKeyOfAnEarlierAttempt");
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_THAT(result.error, HasSubstr("succeeded after 1 restart"));
}

TEST(RunRestart, RanksConnectAgainAfterOneWasKilled) {
  const auto result = run_workers({"--nproc-per-node", "3"}, "ConnectsAGroup");
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_THAT(result.error, HasSubstr("succeeded after 1 restart"));
}

// Whether a program has one thread when it starts. A process with several threads is not forked,
// and some versions of ThreadSanitizer start a thread in every program. It is read before main(),
// because tests of this program that ran before may have left ThreadSanitizer's thread.
const bool kHasOneThreadAtStart = [] {
  const std::filesystem::directory_iterator threads("/proc/self/task");
  return std::distance(begin(threads), end(threads)) == 1;
}();

TEST(RunRestart, WorkersThatPreparedItAreForked) {
  for (int num_shells = 0; num_shells < 2; ++num_shells) {
    // The second case starts the program by a shell script. The restart must execute the script
    // again, because a fork of the program would skip what the script does before.
    std::vector<std::string> words{"--nproc-per-node", "3"};
    if (num_shells == 1) words.insert(words.end(), {"sh", "-c", "exec \"$@\"", "sh"});
    const auto result = run_workers(words, "PreparesRestarts");
    EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
    const bool is_forked = num_shells == 0 && kHasOneThreadAtStart;
    const std::string how = is_forked ? "forked" : "executed";
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_THAT(result.output, HasSubstr(cadre::format("[{}] restart 0 executed\n", rank)));
      EXPECT_THAT(result.output, HasSubstr(cadre::format("[{}] restart 1 {}\n", rank, how)));
    }
  }
}

// Needs two physical cores. The template is bound to rank 0's cores, so rank 1 must leave them.
TEST(RunRestart, ForkedWorkersAreBoundToTheirCores) {
  const auto topology = Topology::of_this_machine();
  ASSERT_TRUE(topology.ok()) << topology.error().message();
  const auto nodes = gpu_nodes(os::read_environment(), 2);
  ASSERT_TRUE(nodes.ok()) << nodes.error().message();
  const auto expected = bind_workers(*topology, BindingMode::kExclusive, 2, *nodes);
  if (!expected.ok()) GTEST_SKIP() << expected.error().message();
  const auto result =
      run_workers({"--nproc-per-node", "2", "--numa-binding", "exclusive"}, "PreparesRestarts");
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
  for (size_t rank = 0; rank < 2; ++rank) {
    const std::string cores = launch::rank_ranges((*expected)[rank]);
    for (int attempt = 0; attempt < 2; ++attempt) {
      EXPECT_THAT(result.output,
                  HasSubstr(cadre::format("[{}] restart {} on cores {}\n", rank, attempt, cores)));
    }
  }
}

TEST(RunRestart, ForkedWorkersStopAndEndLikeOthers) {
  for (const int signal : {SIGTERM, SIGKILL}) {
    std::vector<std::string> words =
        restarted_job(2, {"--nproc-per-node", "3", os::own_executable().value_or_throw(),
                          "--gtest_filter=RunRestartWorker.PreparesRestarts"});
    CadreCommand command(words, {.environment = {{"CADRE_TEST_WAITS", "1"}}});
    for (const char* rank : {"[0]", "[1]", "[2]"}) {
      ASSERT_TRUE(command.wait_for(std::string(rank) + " restart 1 "));
    }
    command.send(signal);
    EXPECT_EQ(command.wait().exit_code, 128 + signal);
    EXPECT_TRUE(command.leaves_nothing());
  }
}

// Rank 1 fails when it gets SIGUSR1. Rank 0 prints "asked" when it gets SIGTERM, and does not end.
TEST(RunRestart, ASignalWhileWorkersAreStoppedEndsTheJob) {
  CadreCommand command(restarted_shells(
      3, 2,
      "if [ $RANK = 1 ]; then trap 'exit 3' USR1; else trap '' USR1; trap 'echo asked' TERM; fi; "
      "echo up; while true; do sleep 0.02; done"));
  ASSERT_TRUE(command.wait_for("[0] up") && command.wait_for("[1] up"));
  command.send(SIGUSR1);
  ASSERT_TRUE(command.wait_for("[0] asked"));
  command.send(SIGTERM);
  ASSERT_TRUE(command.wait_for("cadre: SIGTERM: the workers are not started again\n"));
  const auto system = os::make_native_system();
  // The pause is needed because two signals within 100 ms count as one.
  system->poll({}, system->deadline_in(std::chrono::milliseconds(150)));
  command.send(SIGINT);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.error, HasSubstr("cadre: rank 1 of 2 failed with exit code 3"));
  EXPECT_THAT(result.error, Not(HasSubstr("cadre: restart")));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunRestart, ASignalBetweenTwoAttemptsEndsTheJob) {
  CadreCommand command(restarted_shells(1000, 1, "exit 3"));
  ASSERT_TRUE(command.wait_for("again in 0.4 s"));
  command.send(SIGINT);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGINT);
  EXPECT_THAT(result.error, HasSubstr("cadre: stopped by SIGINT after "));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunRestart, AStoppedAttemptIsNotStartedAgain) {
  CadreCommand command(restarted_shells(
      3, 1,
      "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; trap 'exit 7' TERM; echo up; while true; do "
      "sleep 0.02; done"));
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.error, Not(HasSubstr("restart 2")));
  EXPECT_THAT(result.error, HasSubstr("cadre: stopped by SIGTERM after 1 restart; "));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunRestart, KillOfTheCommandBetweenTwoAttemptsLeavesNothing) {
  CadreCommand command(restarted_shells(1000, 1, "exit 3"));
  ASSERT_TRUE(command.wait_for("again in 0.4 s"));
  command.send(SIGKILL);
  EXPECT_TRUE(command.leaves_nothing());
}

// A `cadre run` that is itself a worker writes only the failure that ended its job to its caller's
// error file, and not those that led to restarts.
TEST(RunRestart, LeavesItsCallerOnlyTheLastFailure) {
  const std::string inner =
      cadre::testing::build_path("bin/cadre") +
      " run --max-restarts 1 sh -c 'exit $((3 + TORCHELASTIC_RESTART_COUNT))'";
  const auto result = run_cadre(shell_job(1, inner));
  EXPECT_EQ(result.exit_code, 4) << result.error;
  EXPECT_THAT(masked(result.error),
              HasSubstr("  exception: rank 0 of 1 failed with exit code 4 on HOST, pid #\n"));
}

}  // namespace
}  // namespace cadre::cli
