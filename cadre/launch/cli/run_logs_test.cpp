// Tests the log files of jobs under `cadre run`.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cadre/core/os/files/file.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Returns the content of all files below the only folder in `folder`, by path below that folder.
std::map<std::string, std::string> files_of_the_job(const std::string& folder) {
  std::vector<std::filesystem::path> jobs;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) jobs.push_back(entry);
  EXPECT_EQ(jobs.size(), 1U);
  std::map<std::string, std::string> files;
  if (jobs.empty()) return files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(jobs[0])) {
    if (!entry.is_regular_file()) continue;
    files[std::filesystem::relative(entry.path(), jobs[0]).string()] =
        *os::read_file(entry.path().string(), size_t{1} << 24);
  }
  return files;
}

std::vector<std::string> logged_job(const std::string& folder, std::vector<std::string> options,
                                    int num_workers, const std::string& script) {
  std::vector<std::string> words = {"run", "--nproc-per-node", std::to_string(num_workers),
                                    "--log-dir", folder};
  words.insert(words.end(), options.begin(), options.end());
  words.insert(words.end(), {"sh", "-c", script});
  return words;
}

constexpr const char* kSpeak = "echo out $RANK; echo err $RANK >&2";

TEST(RunLogs, RedirectsAndTeesEachStream) {
  const testing::TemporaryFolder folder;
  const auto result =
      run_cadre(logged_job(folder.path().string(), {"-r", "0:3,1:1", "-t", "2:2"}, 3, kSpeak));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[2] out 2\n");
  EXPECT_THAT(result.error, HasSubstr("[1] err 1\n"));
  EXPECT_THAT(result.error, HasSubstr("[2] err 2\n"));
  EXPECT_THAT(result.error, Not(HasSubstr("err 0")));
  EXPECT_THAT(result.error, HasSubstr("cadre: log files are in " + folder.path().string() + "/"));
  EXPECT_EQ(files_of_the_job(folder.path().string()),
            (std::map<std::string, std::string>{{"attempt_0/0/stdout.log", "out 0\n"},
                                                {"attempt_0/0/stderr.log", "err 0\n"},
                                                {"attempt_0/1/stdout.log", "out 1\n"},
                                                {"attempt_0/2/stderr.log", "err 2\n"}}));
}

// The launcher's streams are one pipe here, but the files still keep the streams apart.
TEST(RunLogs, StreamsAreKeptApartIfTheLaunchersOutputsAreOne) {
  const testing::TemporaryFolder folder;
  const auto result = CadreCommand(logged_job(folder.path().string(), {"-t3"}, 1, kSpeak),
                                   {.shell = "exec \"$@\" 2>&1"})
                          .wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("[0] out 0\n"));
  EXPECT_THAT(result.output, HasSubstr("[0] err 0\n"));
  EXPECT_EQ(files_of_the_job(folder.path().string()),
            (std::map<std::string, std::string>{{"attempt_0/0/stdout.log", "out 0\n"},
                                                {"attempt_0/0/stderr.log", "err 0\n"}}));
}

TEST(RunLogs, AFilterShowsSomeRanksAndFilesKeepAll) {
  const testing::TemporaryFolder folder;
  const auto result = run_cadre(
      logged_job(folder.path().string(), {"-t", "1", "--local-ranks-filter", "1"}, 3, kSpeak));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[1] out 1\n");
  EXPECT_THAT(result.error, HasSubstr("[1] err 1\n"));
  EXPECT_THAT(result.error, Not(HasSubstr("[0] err")));
  const auto files = files_of_the_job(folder.path().string());
  EXPECT_EQ(files.at("attempt_0/2/stdout.log"), "out 2\n");
  EXPECT_EQ(files.size(), 3U);
}

TEST(RunLogs, LinesWithATextAreCopied) {
  const testing::TemporaryFolder folder;
  const auto result = run_cadre(
      logged_job(folder.path().string(),
                 {"--duplicate-stdout-filters", "loss,a,,b", "--duplicate-stderr-filters", "x"}, 1,
                 "echo loss 1; echo other; echo a,b; echo loss >&2; echo xy >&2"));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[0] loss 1\n[0] other\n[0] a,b\n");
  const auto files = files_of_the_job(folder.path().string());
  EXPECT_EQ(files.at("attempt_0/filtered_stdout.log"), "[0] loss 1\n[0] a,b\n");
  EXPECT_EQ(files.at("attempt_0/filtered_stderr.log"), "[0] xy\n");
}

TEST(RunLogs, AFailureIsReportedFromARedirectedStreamWithItsFolder) {
  const testing::TemporaryFolder folder;
  const auto result =
      run_cadre(logged_job(folder.path().string(), {"-r", "3"}, 1, "echo the reason >&2; exit 3"));
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_THAT(result.error, HasSubstr("the last line of rank 0:\n    the reason\n"));
  EXPECT_THAT(result.error, HasSubstr("  log files: " + folder.path().string() + "/"));
  EXPECT_THAT(result.error, HasSubstr("/attempt_0/0"));
}

TEST(RunLogs, EachAttemptHasFilesOfItsOwnAndTheErrorFileIsBesideThem) {
  const testing::TemporaryFolder folder;
  const auto result =
      run_cadre(logged_job(folder.path().string(), {"-r3", "--max-restarts", "1"}, 1,
                           "echo $TORCHELASTIC_RESTART_COUNT; echo '{}' >$TORCHELASTIC_ERROR_FILE; "
                           "exit $((1 - TORCHELASTIC_RESTART_COUNT))"));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(files_of_the_job(folder.path().string()),
            (std::map<std::string, std::string>{{"attempt_0/0/stdout.log", "0\n"},
                                                {"attempt_0/0/stderr.log", ""},
                                                {"attempt_0/0/error.json", "{}\n"},
                                                {"attempt_1/0/stdout.log", "1\n"},
                                                {"attempt_1/0/stderr.log", ""},
                                                {"attempt_1/0/error.json", "{}\n"}}));
}

TEST(RunLogs, WithoutAFolderTheTemporaryOneIsNamed) {
  const testing::TemporaryFolder folder;
  const auto result = run_cadre({"run", "--rdzv-id", "7", "-r1", "echo", "hello"},
                                {{"TMPDIR", folder.path().string()}});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "");
  EXPECT_THAT(result.error,
              HasSubstr("log files are in " + folder.path().string() + "/cadre-logs-7_"));
  EXPECT_EQ(files_of_the_job(folder.path().string()).at("attempt_0/0/stdout.log"), "hello\n");
}

TEST(RunLogs, TheNullDeviceAsFolderDropsRedirectedStreams) {
  const auto result = run_cadre(logged_job("/dev/null", {"-r", "1"}, 1, kSpeak));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.error, "[0] err 0\n");
}

// A limit of file sizes is used to make writes fail, as on a full disk.
TEST(RunLogs, ALogFileThatCannotBeWrittenIsNamedAndTheJobContinues) {
  const testing::TemporaryFolder folder;
  const auto result =
      CadreCommand(logged_job(folder.path().string(), {"-r", "1"}, 2, "seq 1 20000; echo done >&2"),
                   {.shell = "ulimit -f 32; exec \"$@\""})
          .wait();
  EXPECT_EQ(result.exit_code, 1) << result.error;
  EXPECT_THAT(result.error, HasSubstr("/stdout.log"));
  EXPECT_THAT(result.error, HasSubstr("further output is not written to this log file\n"));
  EXPECT_THAT(result.error, HasSubstr("[0] done\n"));
  EXPECT_THAT(result.error, HasSubstr("[1] done\n"));
  EXPECT_THAT(result.error, HasSubstr("2 log files are incomplete"));
}

TEST(RunLogs, AFullDiskIsNamedAndTheJobContinues) {
  const testing::TemporaryFolder folder;
  const std::string disk = folder.path().string();
  const std::string mount = "mount -t tmpfs -o size=64k none " + disk;
  if (std::system(("unshare -m sh -c '" + mount + "' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << "a file system of its own for the test needs root";
  }
  const auto result =
      CadreCommand(logged_job(disk, {"-r", "1"}, 1, "seq 1 20000; echo done >&2"),
                   {.shell = "exec unshare -m sh -c '" + mount + R"( && exec "$@"' sh "$@")"})
          .wait();
  EXPECT_EQ(result.exit_code, 1) << result.error;
  EXPECT_THAT(result.error, HasSubstr("/stdout.log"));
  EXPECT_THAT(result.error, HasSubstr("No space left on device"));
  EXPECT_THAT(result.error, HasSubstr("[0] done\n"));
}

// Each rank writes more than pipes and buffers hold, and nothing reads the launcher's standard
// output until rank 1 has ended.
TEST(RunLogs, ARedirectedStreamDoesNotWaitForTheReaderOfTheOutput) {
  const testing::TemporaryFolder folder;
  CadreCommand command(
      logged_job(folder.path().string(), {"-r", "1:1"}, 2, "seq 1 1000000; echo end of $RANK >&2"),
      {.reads_output = false});
  EXPECT_TRUE(command.wait_for("[1] end of 1\n"));
  EXPECT_THAT(command.seen().error, Not(HasSubstr("end of 0")));
  command.start_reading();
  EXPECT_EQ(command.wait().exit_code, 0);
  EXPECT_THAT(files_of_the_job(folder.path().string()).at("attempt_0/1/stdout.log"),
              HasSubstr("\n1000000\n"));
}

TEST(RunLogs, AFolderThatCannotBeMadeEndsTheJobAtItsStart) {
  const testing::TemporaryFolder folder;
  const auto result =
      run_cadre(logged_job("/proc/nothing", {"-r", "1"}, 1, "touch " + folder.file("ran")));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("the folder for log files: create the folder /proc/nothing"));
  EXPECT_FALSE(std::filesystem::exists(folder.file("ran")));
}

}  // namespace
}  // namespace cadre::cli
