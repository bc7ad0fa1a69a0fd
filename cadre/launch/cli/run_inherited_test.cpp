// Tests what `cadre run` inherits: signals that are ignored or blocked, limits, closed streams, the
// umask, and a working directory that was removed. Also tests what its workers inherit.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "cadre/core/comm/connect.h"
#include "cadre/core/os/proc/executable.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/reserved_port.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;

CommandResult run_under(const std::string& shell, std::vector<std::string> words) {
  return CadreCommand(std::move(words), {.shell = shell + " \"$@\""}).wait();
}

// Shell commands that print the masks of ignored and of blocked signals of a worker.
constexpr const char* kPrintIgnored = "sed -nE 's/^SigIgn:[[:space:]]*/0x/p' /proc/self/status";
constexpr const char* kPrintBlocked = "sed -nE 's/^SigBlk:[[:space:]]*/0x/p' /proc/self/status";

uint64_t mask_in(const std::string& output) {
  constexpr uint64_t kGlibcOwn = 0b11ULL << 31;
  const size_t at = output.find("0x");
  if (at == std::string::npos) return ~uint64_t{0};
  return std::stoull(output.substr(at), nullptr, 16) & ~kGlibcOwn;
}

uint64_t bit(int signal) {
  return uint64_t{1} << (signal - 1);
}

TEST(RunInherited, WithIgnoredSigchldAWorkersExitCodeCounts) {
  for (const int num_workers : {1, 2}) {
    const auto result =
        run_under("exec env --ignore-signal=CHLD", shell_job(num_workers, "sleep 0.1; exit 3"));
    EXPECT_EQ(result.exit_code, 3) << result.error;
    EXPECT_THAT(result.error, HasSubstr("failed with exit code 3"));
  }
}

TEST(RunInherited, WithBlockedSignalsAJobEndsAndStopsAsUsual) {
  const std::string blocks = "exec env --block-signal";
  EXPECT_EQ(run_under(blocks, shell_job(1, "exit 4")).exit_code, 4);
  CadreCommand command(shell_job(1,
                                 "trap 'echo saved; exit 0' TERM; echo up; while true; do sleep "
                                 "0.02; done"),
                       {.shell = blocks + " \"$@\""});
  ASSERT_TRUE(command.wait_for("[0] up"));
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  EXPECT_THAT(result.output, HasSubstr("[0] saved"));
  EXPECT_TRUE(command.leaves_nothing());
}

TEST(RunInherited, WorkersBlockNothing) {
  EXPECT_EQ(mask_in(run_under("exec env --block-signal", shell_job(1, kPrintBlocked)).output), 0U);
}

// Workers must ignore the signals that the launcher's parent ignored, as if a shell had started
// them. Exceptions are SIGCHLD and the signals that stop a job.
TEST(RunInherited, WorkersIgnoreWhatTheLauncherWasStartedWithIgnored) {
  // Resets the signals that this test itself ignores.
  const std::string defaults = "exec env --default-signal ";
  const auto result =
      run_under(defaults + "env --ignore-signal=HUP,PIPE,USR1,XFSZ,INT,QUIT,TERM,CHLD",
                shell_job(1, kPrintIgnored));
  EXPECT_EQ(mask_in(result.output), bit(SIGHUP) | bit(SIGPIPE) | bit(SIGUSR1) | bit(SIGXFSZ));
  EXPECT_EQ(mask_in(run_under(defaults, shell_job(1, kPrintIgnored)).output), 0U);
}

TEST(RunInherited, AStopReachesWorkersThoughItsSignalWasIgnored) {
  const auto result = run_under("exec env --ignore-signal=TERM",
                                {"run", "--nproc-per-node", "2", "--shutdown-timeout", "1000", "sh",
                                 "-c", "if [ $RANK = 1 ]; then exit 5; fi; exec sleep 1000"});
  EXPECT_EQ(result.exit_code, 5) << result.error;
}

TEST(RunInherited, ItsOutputAtTheLimitOfFilesIsAnErrorWithTheReason) {
  const cadre::testing::TemporaryFolder folder;
  const auto result =
      run_under("ulimit -f 1; exec >" + folder.file("out") + "; exec", shell_job(2, "seq 1 5000"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(
      result.error,
      "cadre: standard output: write: File too large (errno 27); further output on it is lost\n");
  EXPECT_EQ(std::filesystem::file_size(folder.file("out")), 512U);
  const auto help =
      run_under("ulimit -f 1; exec >" + folder.file("help") + "; exec", {"run", "--help"});
  EXPECT_EQ(help.exit_code, 1);
  EXPECT_EQ(help.error, "cadre: standard output: File too large\n");
}

TEST(RunInherited, AReaderOfACommandThatHasGoneEndsItWithoutAMessage) {
  const auto result =
      run_under("{ sleep 0.2; \"$@\"; echo code $? >&2; } | true; true", {"help", "run"});
  EXPECT_EQ(result.error, "code 141\n");
}

TEST(RunInherited, ASmallStackIsRaisedForTheLauncherAlone) {
  const auto result =
      run_under("ulimit -Ss 64; exec", shell_job(2,
                                                 "head -c 300000 /dev/zero | tr '\\000' x; echo; "
                                                 "echo stack $(ulimit -Ss)"));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[0] stack 64\n"));
  EXPECT_THAT(result.output, HasSubstr("[1] stack 64\n"));
}

TEST(RunInherited, OnASmallStackAJobRunsAndFailsAsUsual) {
  const auto result = run_under("ulimit -s 64; exec",
                                shell_job(2, "seq 1 20000; [ $RANK = 0 ] || exit 3; sleep 50"));
  EXPECT_EQ(result.exit_code, 3) << result.error;
  EXPECT_THAT(result.error, HasSubstr("cadre: rank 1 of 2 failed with exit code 3"));
}

TEST(RunInherited, AStackWithoutRoomIsNamedWithItsRemedy) {
  const std::string large(70'000, 'x');  // the environment takes space on the stack
  const auto result = CadreCommand(shell_job(1, "exit 0"), {.environment = {{"LARGE", large}},
                                                            .shell = "ulimit -s 96; exec \"$@\""})
                          .wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("raise the limit (ulimit -s, LimitSTACK= of systemd)"));
}

TEST(RunInherited, WithClosedStreamsAJobRunsAndItsSocketsAreNoStreams) {
  const cadre::testing::TemporaryFolder folder;
  const auto result = run_under("exec <&- 2>&-; exec",
                                shell_job(1, "readlink /proc/$PPID/fd/0 /proc/$PPID/fd/2; exit 3"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.output, "[0] /dev/null\n[0] /dev/null\n");
}

TEST(RunInherited, InAFolderThatIsGoneEveryCommandWorks) {
  const cadre::testing::TemporaryFolder folder;
  const std::string gone = "mkdir " + folder.file("x") + "; cd " + folder.file("x") + "; rmdir " +
                           folder.file("x") + "; exec";
  const auto job = run_under(gone, shell_job(1, "echo hello"));
  EXPECT_EQ(job.exit_code, 0) << job.error;
  EXPECT_EQ(job.output, "[0] hello\n");
  const auto info = run_under(gone, {"info"});
  EXPECT_EQ(info.exit_code, 0) << info.error;
  const auto records = run_under(gone, {"run", "--flight-records", "records", "true"});
  EXPECT_EQ(records.exit_code, 1);
  EXPECT_THAT(records.error, HasSubstr("the folder for flight records, records: "));
}

TEST(RunInherited, WorkersKeepTheUmask) {
  EXPECT_EQ(run_under("umask 0027; exec", shell_job(1, "umask")).output, "[0] 0027\n");
}

TEST(RunInherited, ARelativeTmpdirIsAbsoluteForWorkers) {
  const cadre::testing::TemporaryFolder folder;
  const auto result = run_under("cd " + folder.path().string() + "; TMPDIR=. exec",
                                shell_job(1, "cd /; test -d $(dirname $TORCHELASTIC_ERROR_FILE)"));
  EXPECT_EQ(result.exit_code, 0) << result.error;
}

TEST(RunInherited, ATmpdirThatIsNoneIsNamed) {
  const cadre::testing::TemporaryFolder folder;
  std::ofstream(folder.file("plain")) << "";
  for (const std::string& wrong : {folder.file("none"), folder.file("plain")}) {
    const auto result = run_cadre(shell_job(1, "echo started"), {{"TMPDIR", wrong}});
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_EQ(result.output, "");
    EXPECT_THAT(
        result.error,
        HasSubstr("temporary files (set TMPDIR to another folder): make a folder in " + wrong));
  }
}

// This test is the program of the workers that tests below start with `cadre run`. If it is run
// directly, the group has one rank.
TEST(RunInheritedWorker, ConnectsAGroup) {
  const auto system = os::make_native_system();
  const auto world = connect_from_environment(*system, {}, system->deadline_in(kPatience));
  if (const char* expected = std::getenv("CADRE_TEST_WORLD")) {
    EXPECT_EQ(world->world_size(), std::atoi(expected));
  }
  world->barrier();
  world->close(system->deadline_in(kPatience));
}

std::vector<std::string> group_job() {
  return {"run",
          "--nproc-per-node",
          "2",
          os::own_executable().value_or_throw(),
          "--gtest_brief=1",
          "--gtest_filter=RunInheritedWorker.ConnectsAGroup"};
}

// Simulates a start by mpirun or srun: each worker removes the variables of `cadre run` and sets
// those of mpirun or srun.
TEST(RunInherited, RanksConnectByTheVariablesOfMpirunAndSrun) {
  for (const std::string variables :
       {"OMPI_COMM_WORLD_RANK=$RANK OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$RANK",
        "PMI_RANK=$RANK PMI_SIZE=2", "SLURM_PROCID=$RANK SLURM_STEP_NUM_TASKS=2"}) {
    const testing::ReservedPort port;
    const std::string script = cadre::format(
        "exec env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE -u CADRE_JOB_TOKEN "
        "-u CADRE_STORE_PROTOCOL -u TORCHELASTIC_USE_AGENT_STORE MASTER_PORT={} "
        "CADRE_TEST_WORLD=2 {} \"$@\"",
        port.number(), variables);
    std::vector<std::string> words = group_job();
    words.insert(words.begin() + 3, {"sh", "-c", script, "sh"});
    const auto result = run_cadre(words);
    EXPECT_EQ(result.exit_code, 0) << variables << result.output << result.error;
  }
}

// The limit of file sizes is smaller than a shared-memory segment for all ranks. The ranks must
// still connect.
TEST(RunInherited, UnderALimitOfFilesRanksConnect) {
  const auto result = run_under("ulimit -f 1000000; exec", group_job());
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
}

TEST(RunInherited, ALimitOfFilesThatIsTooLowIsNamedByTheRank) {
  const auto result = run_under("ulimit -f 100; exec", group_job());
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output,
              HasSubstr("this process may make files of at most 51200 bytes (ulimit -f"))
      << result.error;
}

TEST(RunInherited, RanksWithClosedStreamsConnect) {
  std::vector<std::string> words = group_job();
  words.insert(words.begin() + 3, {"sh", "-c", "exec \"$@\" <&- 2>&-", "sh"});
  const auto result = run_cadre(words);
  EXPECT_EQ(result.exit_code, 0) << result.output << result.error;
}

// The worker's program is set-user-ID and runs as another user, so the launcher may not kill it. It
// must report the process and end.
TEST(RunInherited, AProcessOfAnotherUserIsNamedInsteadOfWaitedFor) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a program of another user";
  const cadre::testing::TemporaryFolder folder;
  const std::string other = folder.file("become");
  std::error_code failure;
  std::filesystem::copy_file("/usr/bin/setpriv", other, failure);
  if (failure) GTEST_SKIP() << "there is no setpriv";
  ::chmod(other.c_str(), 04755);
  ::chmod(folder.path().c_str(), 0755);
  CadreCommand command({"run", "--shutdown-timeout", "0", other, "--reuid", "0", "sh", "-c",
                        "echo user $(id -u); exec sleep 1000"},
                       {.environment = {{"TMPDIR", "/tmp"}},
                        .shell = "exec setpriv --reuid 65534 --regid 65534 --clear-groups \"$@\""});
  const bool is_up = command.wait_for("[0] user ") || !command.seen().error.empty();
  if (!is_up || command.seen().output.find("user 0") == std::string::npos) {
    GTEST_SKIP() << "set-user-ID has no effect here: " << command.seen().error;
  }
  command.send(SIGTERM);
  const auto result = command.wait();
  EXPECT_EQ(result.exit_code, 128 + SIGTERM);
  const std::regex named(
      "cadre: could not be killed, because it is another user's: (sh|sleep) \\(pid #\\)\n");
  EXPECT_TRUE(std::regex_search(masked(result.error), named)) << result.error;
  for (const int pid : command.marked_processes()) ::kill(pid, SIGKILL);
}

}  // namespace
}  // namespace cadre::cli
