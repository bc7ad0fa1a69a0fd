// Tests the end of `cadre run`: exit codes, reports, and programs that cannot be started.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

TEST(RunExit, SucceedsSilentlyWhenAllWorkersSucceed) {
  const auto result = run_cadre(shell_job(2, "exit 0"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.error, "");
}

TEST(RunExit, ReportsTheFirstFailureLast) {
  const auto result = run_cadre(shell_job(
      4,
      "if [ $RANK = 2 ]; then echo about to fail; echo 'no such layer' >&2; exit 3; fi; sleep 50"));
  EXPECT_EQ(result.exit_code, 3);
  const size_t report = result.error.find("cadre: the last");
  ASSERT_NE(report, std::string::npos) << result.error;
  EXPECT_EQ(masked(result.error.substr(report)),
            "cadre: the last 2 lines of rank 2, of which the last one is shown above:\n"
            "    about to fail\n"
            "cadre: rank 2 of 4 failed with exit code 3 on HOST, pid #, after # s\n"
            "  others: ranks 0-1, 3: stopped by cadre because rank 2 failed\n");
}

TEST(RunExit, ExplainsASegmentationFault) {
  const auto result = run_cadre(shell_job(2, "if [ $RANK = 1 ]; then kill -SEGV $$; fi; sleep 50"));
  EXPECT_EQ(result.exit_code, 128 + SIGSEGV);
  EXPECT_EQ(masked(result.error),
            "cadre: rank 1 wrote nothing\n"
            "cadre: rank 1 of 2 failed with signal 11 (SIGSEGV) on HOST, pid #, after # s\n"
            "  meaning: invalid memory access\n"
            "  others: rank 0: stopped by cadre because rank 1 failed\n");
}

TEST(RunExit, ExplainsAKill) {
  const auto result = run_cadre(shell_job(1, "kill -KILL $$"));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_EQ(masked(result.error),
            "cadre: rank 0 wrote nothing\n"
            "cadre: rank 0 of 1 failed with signal 9 (SIGKILL) on HOST, pid #, after # s\n"
            "  meaning: killed from outside: by someone's kill -9, a batch system's limit, or a "
            "container's memory limit (see dmesg)\n");
}

// A control group with a limit of memory, which is removed at the end.
class LimitedMemory {
 public:
  explicit LimitedMemory(const char* limit) {
    const bool is_first_version = std::filesystem::exists("/sys/fs/cgroup/memory");
    folder_ = cadre::format("/sys/fs/cgroup/{}cadre-test-{}", is_first_version ? "memory/" : "",
                            ::getpid());
    std::error_code failure;
    std::filesystem::create_directory(folder_, failure);
    std::ofstream file(folder_ + (is_first_version ? "/memory.limit_in_bytes" : "/memory.max"));
    exists_ = bool(file << limit << std::flush);
  }
  ~LimitedMemory() {
    std::error_code failure;
    std::filesystem::remove(folder_, failure);
  }
  LimitedMemory(const LimitedMemory&) = delete;
  LimitedMemory& operator=(const LimitedMemory&) = delete;

  bool exists() const { return exists_; }
  // A command of a shell by which it moves into the group.
  std::string entering() const { return "echo $$ >" + folder_ + "/cgroup.procs"; }

 private:
  std::string folder_;
  bool exists_ = false;
};

TEST(RunExit, AWorkerThatTheKernelKillsForItsMemoryIsReported) {
  const LimitedMemory group("32M");
  if (!group.exists()) GTEST_SKIP() << "control groups for memory need root";
  const auto result = run_cadre(shell_job(
      2, "if [ $RANK = 1 ]; then " + group.entering() + "; exec tail /dev/zero; fi; sleep 50"));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_EQ(masked(result.error),
            "cadre: rank 1 wrote nothing\n"
            "cadre: rank 1 of 2 failed with signal 9 (SIGKILL) on HOST, pid #, after # s\n"
            "  meaning: killed, most likely because memory ran out: the kernel killed 1 process of "
            "this machine for that reason during the job. Use a smaller batch or fewer workers\n"
            "  others: rank 0: stopped by cadre because rank 1 failed\n");
}

TEST(RunExit, FoldsOtherEndingsIntoOneLine) {
  // Rank 0 succeeds first. Then rank 1 fails. Rank 2 exits with a code of its own when it is asked
  // to stop, and rank 3 ignores SIGTERM and is killed.
  const auto result = run_cadre(
      {"run", "--nproc-per-node", "4", "--shutdown-timeout", "1", "sh", "-c",
       "case $RANK in 0) exit 0;; 1) sleep 1; exit 9;; 2) trap 'exit 5' TERM;; 3) trap '' TERM;; "
       "esac; while true; do sleep 0.05; done"});
  EXPECT_EQ(result.exit_code, 9);
  EXPECT_NE(result.error.find(
                "  others: rank 2: ended by exit code 5; rank 0: had succeeded; rank 3: killed, "
                "because it did not end within 1 s of SIGTERM\n"),
            std::string::npos)
      << result.error;
}

TEST(RunExit, ShowsTheMessageThatPythonLeft) {
  const auto result = run_cadre(shell_job(
      1,
      R"(echo '{"message": {"message": "ValueError: odd"}}' > $TORCHELASTIC_ERROR_FILE; exit 1)"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.error.find("  exception: ValueError: odd\n"), std::string::npos) << result.error;
}

// A worker of a job starts another job. The report of the outer job must contain the failure of the
// inner one.
TEST(RunExit, LeavesItsFailureWhereItsCallerLooks) {
  const std::string inner = cadre::testing::build_path("bin/cadre") +
                            " run --nproc-per-node 2 sh -c 'test $RANK = 0 || exit 3; sleep 50'";
  const auto result = run_cadre(shell_job(1, inner));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(masked(result.error)
                .find("  exception: rank 1 of 2 failed with exit code 3 on HOST, pid #\n"),
            std::string::npos)
      << result.error;
}

TEST(RunExit, SaysWhenItsFailureCannotBeLeft) {
  const auto result = run_cadre(shell_job(1, "exit 3"), {{"TORCHELASTIC_ERROR_FILE", "/no/x"}});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_NE(result.error.find("cadre: the caller's TORCHELASTIC_ERROR_FILE: "), std::string::npos)
      << result.error;
}

TEST(RunExit, KeepsTheLastThirtyLines) {
  const auto result = run_cadre(shell_job(1, "seq 1 100; exit 1"));
  EXPECT_NE(result.error.find("cadre: the last 30 lines of rank 0:\n    71\n    72\n"),
            std::string::npos)
      << result.error;
  EXPECT_NE(result.error.find("\n    100\ncadre: rank 0 of 1 failed"), std::string::npos);
}

struct Unstartable {
  std::vector<std::string> words;
  int exit_code;
  std::string sentence;
};

class RunUnstartable : public ::testing::Test {
 protected:
  RunUnstartable() {
    std::ofstream(folder_ + "/plain") << "text\n";
    std::ofstream(folder_ + "/script") << "#!/bin/sh\n";
    std::ofstream(folder_ + "/orphan") << "#!/no/such/interpreter\n";
    std::ofstream(folder_ + "/text") << "neither\n";
    for (const char* name : {"/orphan", "/text"}) {
      std::filesystem::permissions(folder_ + name, std::filesystem::perms::owner_all);
    }
  }

  cadre::testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(RunUnstartable, SaysWhyInOneSentence) {
  const std::vector<Unstartable> cases = {
      {{"no-such-program"}, 127, "\"no-such-program\" was not found in PATH"},
      {{"./no/such"}, 127, "\"./no/such\" does not exist"},
      {{"train.py"}, 127, "there is no script \"train.py\""},
      {{folder_}, 126, "\"" + folder_ + "\" is a directory, not a program"},
      {{folder_ + "/plain"},
       126,
       "\"" + folder_ +
           "/plain\" is not a program: it is not executable, and it begins neither as a compiled "
           "program does nor with #!; if it is a script, name its interpreter before it (sh " +
           folder_ + "/plain)"},
      {{folder_ + "/script"},
       126,
       "\"" + folder_ + "/script\" is not executable: chmod +x " + folder_ + "/script"},
      {{folder_ + "/orphan"},
       126,
       "\"" + folder_ +
           "/orphan\" cannot be executed: the interpreter named in its first line, or "
           "its loader, does not exist"},
      {{folder_ + "/text"},
       126,
       "\"" + folder_ +
           "/text\" cannot be executed: it is neither a program for this machine nor a "
           "script that begins with #!"},
      {{"--nproc-per-node", "0", "true"},
       2,
       "--nproc-per-node 0: expected a number from 1 to 4096, auto, gpu or cpu"},
      {{"--nproc-per-node", "1000000", "true"},
       2,
       "--nproc-per-node 1000000: expected a number from 1 to 4096, auto, gpu or cpu"},
      {{"--nnodes", "2", "true"},
       2,
       "a job on several hosts needs --master-addr HOST, an address of the host with --node-rank "
       "0, "
       "or --rdzv-backend c10d with --rdzv-endpoint HOST:PORT"},
      {{"--nproc-per-nide", "2", "true"},
       2,
       "unknown option --nproc-per-nide; did you mean --nproc-per-node?"},
      {{}, 2, "no program to run; for example: cadre run --nproc-per-node 2 ./train"},
  };
  for (const Unstartable& one : cases) {
    std::vector<std::string> words = one.words;
    words.insert(words.begin(), "run");
    const auto result = run_cadre(words);
    EXPECT_EQ(result.exit_code, one.exit_code) << one.sentence;
    EXPECT_EQ(result.error, "cadre run: " + one.sentence + "\n");
  }
}

// The remedy in the error must lead to a program that starts, and not to another error.
TEST_F(RunUnstartable, OfANameInThisFolderSaysTheLastRemedyFirst) {
  const auto run_here = [&](const std::string& name) {
    return CadreCommand({"run", name}, {.shell = "cd " + folder_ + "; exec \"$@\""}).wait();
  };
  std::filesystem::create_directory(folder_ + "/package");
  // The file is renamed, because PATH may contain the program "script" of util-linux.
  std::filesystem::rename(folder_ + "/script", folder_ + "/own-script");
  const auto folder = run_here("package");
  EXPECT_EQ(folder.exit_code, 126);
  EXPECT_NE(folder.error.find("package\" is a directory, not a program"), std::string::npos)
      << folder.error;
  EXPECT_NE(run_here("plain").error.find("name its interpreter before it (sh ./plain)"),
            std::string::npos);
  const auto script = run_here("own-script");
  EXPECT_EQ(script.exit_code, 127);
  EXPECT_NE(script.error.find("chmod +x own-script, then say ./own-script"), std::string::npos)
      << script.error;
  EXPECT_NE(run_here("text").error.find("say ./text"), std::string::npos);
}

}  // namespace
}  // namespace cadre::cli
