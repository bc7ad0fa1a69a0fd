// Tests programs that fail under cadre::record(): the report of `cadre run`, and the files that are
// written for launchers.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "cadre/core/wire/crash_file.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string crashing_worker() {
  return cadre::testing::build_path("bin/cadre_crashing_worker");
}

// Masks the report as for other tests, and also thread numbers, source line numbers and source
// folders.
std::string masked_crash(std::string text) {
  text = std::regex_replace(masked(std::move(text)), std::regex("thread [0-9]+"), "thread #");
  text = std::regex_replace(text, std::regex("\\.cpp:[0-9]+"), ".cpp:#");
  return std::regex_replace(text, std::regex("at [^ \n]*/"), "at ");
}

std::string report_of(const std::string& way) {
  return masked_crash(run_cadre({"run", "--nproc-per-node", "1", crashing_worker(), way}).error);
}

// Runs the worker without a launcher, after the commands `before`; returns its exit code as a shell
// reports it, and its standard error.
std::pair<int, std::string> run_alone(const std::string& way, const std::string& error_file,
                                      const std::string& before = "") {
  const cadre::testing::TemporaryFolder folder;
  const std::string output = folder.file("output");
  const std::string script = "(" + before + " export TORCHELASTIC_ERROR_FILE=" + error_file +
                             "; exec " + crashing_worker() + " " + way + ") 2>&1 | cat >" + output +
                             "; exit ${PIPESTATUS[0]}";
  const int status = WEXITSTATUS(std::system(("exec bash -c '" + script + "'").c_str()));
  std::ifstream file(output);
  return {status, std::string(std::istreambuf_iterator<char>(file), {})};
}

TEST(RunRecord, ReportsAnException) {
  EXPECT_EQ(report_of("exception"),
            "[0] terminate called after throwing an instance of 'std::runtime_error'\n"
            "[0]   what():  no such layer\n"
            "cadre: the last 2 lines of rank 0 are shown above\n"
            "cadre: rank 0 of 1 failed with exit code 1 on HOST, pid #, after # s\n"
            "  exception: std::runtime_error: no such layer\n");
}

TEST(RunRecord, ReportsExceptionsOfOtherTypes) {
  EXPECT_THAT(report_of("int"), HasSubstr("  exception: int\n"));
  EXPECT_THAT(report_of("nested"), HasSubstr("std::invalid_argument>: cannot load\n"));
}

TEST(RunRecord, ReturnsWhatTheProgramReturns) {
  EXPECT_EQ(run_cadre({"run", crashing_worker(), "exit"}).exit_code, 5);
  EXPECT_EQ(run_cadre({"run", crashing_worker(), "success"}).exit_code, 0);
}

TEST(RunRecord, StoresTheDetailsOfAnError) {
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("error.json");
  const auto [status, error] = run_alone("error", path);
  EXPECT_EQ(status, 1);
  EXPECT_EQ(error,
            "terminate called after throwing an instance of 'cadre::Error'\n"
            "  what():  rank 1 is gone\n");
  const auto message = nlohmann::json::parse(std::ifstream(path))["message"];
  EXPECT_EQ(message["message"], "cadre::Error: rank 1 is gone");
  const auto& details = message["extraInfo"]["cadre"];
  EXPECT_EQ(details["code"], "kPeerLost");
  EXPECT_EQ(details["group"], "world");
  EXPECT_EQ(details["operation"], "all_reduce");
  EXPECT_EQ(details["operation_number"], 3);
  EXPECT_EQ(details["culprit"], 1);
}

// No file can grow, as on a full disk. The exception must still be printed.
TEST(RunRecord, AFullDiskDoesNotHideTheException) {
  const cadre::testing::TemporaryFolder folder;
  const auto [status, error] =
      run_alone("exception", folder.file("error.json"), "trap \"\" XFSZ; ulimit -f 0;");
  EXPECT_EQ(status, 1);
  EXPECT_THAT(error, HasSubstr("  what():  no such layer\n"
                               "cadre: the exception was not stored for the launcher: "));
}

// Reads the error file with torch's own functions, in a Python that has torch.
TEST(RunRecord, TorchReadsTheFile) {
  const std::string python = cadre::testing::source_path(".venv/bin/python3");
  const std::string import = python + " -c 'import torch.distributed.elastic' 2>/dev/null";
  if (std::system(import.c_str()) != 0) GTEST_SKIP() << "no Python with torch in .venv";
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("error.json");
  run_alone("error", path);
  std::ofstream(folder.file("read.py"))
      << "import sys\n"
         "from torch.distributed.elastic.multiprocessing.errors import *\n"
         "f = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=sys.argv[1])\n"
         "assert f.message['message'] == 'cadre::Error: rank 1 is gone', f.message\n"
         "assert f.timestamp > 1700000000, f.timestamp\n"
         "assert 'cadre::Error: rank 1 is gone' in str(ChildFailedError('worker', {0: f}))\n";
  EXPECT_EQ(std::system((python + " " + folder.file("read.py") + " " + path).c_str()), 0);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// These tests are not built with sanitizers, which install their own handlers for these signals.

TEST(RunRecord, ReportsTheStackOfASegmentationFault) {
  const std::string report = report_of("segv");
  EXPECT_THAT(report, StartsWith("[0] cadre: crashed with signal 11 (SIGSEGV), address 0x10, "
                                 "thread #\n"
                                 "cadre: the last line of rank 0 is shown above\n"
                                 "cadre: the stack of rank 0, innermost call first:\n"
                                 "    #0 (anonymous namespace)::write_to(int volatile*) at "
                                 "crashing_worker_test_main.cpp:#\n"
                                 "    #1 (anonymous namespace)::fail("));
  EXPECT_THAT(report, EndsWith(" main at crashing_worker_test_main.cpp:#\n"
                               "cadre: rank 0 of 1 failed with signal 11 (SIGSEGV) on HOST, pid #, "
                               "after # s\n"
                               "  meaning: invalid memory access\n"
                               "  crash: SIGSEGV at address 0x10 in (anonymous "
                               "namespace)::write_to(int volatile*) at "
                               "crashing_worker_test_main.cpp:#\n"));
}

TEST(RunRecord, ReportsTheStackOfAnotherThread) {
  const std::string report = report_of("thread");
  EXPECT_THAT(report, HasSubstr("    #0 (anonymous namespace)::write_to(int volatile*) at "
                                "crashing_worker_test_main.cpp:"));
  EXPECT_THAT(report, HasSubstr("  crash: SIGSEGV at address 0x0 in "));
}

TEST(RunRecord, ReportsTheCallerOfANullFunction) {
  const std::string report = report_of("null-call");
  EXPECT_THAT(report, HasSubstr("    #0 an unknown function in 0x0\n    #1 (anonymous "
                                "namespace)::fail("));
  EXPECT_THAT(report, HasSubstr("  crash: SIGSEGV at address 0x0 in (anonymous namespace)::fail("));
}

TEST(RunRecord, ReportsAStackOverflow) {
  const std::string report = report_of("overflow");
  EXPECT_THAT(report, HasSubstr("(anonymous namespace)::recurse(int volatile*) at "
                                "crashing_worker_test_main.cpp:"));
  EXPECT_THAT(report, HasSubstr(" times\n"));
  EXPECT_THAT(report, HasSubstr("failed with signal 11 (SIGSEGV)"));
}

TEST(RunRecord, ReportsAbort) {
  const std::string report = report_of("abort");
  EXPECT_THAT(report, HasSubstr("failed with signal 6 (SIGABRT)"));
  EXPECT_THAT(report, HasSubstr("  crash: SIGABRT in (anonymous namespace)::fail("));
}

TEST(RunRecord, ReportsWhereAnExceptionOfAThreadWasThrown) {
  const std::string report = report_of("terminate");
  EXPECT_THAT(report, HasSubstr("  exception: std::runtime_error: no such layer\n"));
  EXPECT_THAT(report, HasSubstr("  crash: SIGABRT in (anonymous namespace)::refuse() at "));
}

TEST(RunRecord, KeepsTheStatusOfTheSignal) {
  const cadre::testing::TemporaryFolder folder;
  for (const auto& [way, signal] : {std::pair("segv", SIGSEGV), {"abort", SIGABRT}}) {
    const std::string path = folder.file(std::string(way) + ".json");
    const auto [status, error] = run_alone(way, path);
    EXPECT_EQ(status, 128 + signal);
    const auto stack = run_cadre({"stack", path + ".crash"});
    EXPECT_EQ(stack.exit_code, 0) << stack.error;
    EXPECT_THAT(stack.output, HasSubstr("(anonymous namespace)::fail("));
  }
}

TEST(RunRecord, PrintsAddressesWithoutALauncher) {
  const auto [status, error] = run_alone("segv", "");
  EXPECT_EQ(status, 128 + SIGSEGV);
  EXPECT_THAT(error, HasSubstr("\n  #0 "));
  EXPECT_THAT(error, HasSubstr("bin/cadre_crashing_worker+0x"));
}

TEST(RunRecord, LeavesTheStackForTheCallerOfTheLauncher) {
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("error.json");
  run_cadre({"run", crashing_worker(), "segv"}, {{"TORCHELASTIC_ERROR_FILE", path}});
  const auto message = nlohmann::json::parse(std::ifstream(path))["message"];
  EXPECT_THAT(message["message"].get<std::string>(), HasSubstr("SIGSEGV at address 0x10 in "));
  EXPECT_EQ(message["errorCode"], -SIGSEGV);
  EXPECT_THAT(message["extraInfo"]["py_callstack"].get<std::string>(),
              HasSubstr("\n#0 (anonymous namespace)::write_to(int volatile*) at "));
}
#endif

TEST(RunRecord, RefusesWhatIsNoCrashFile) {
  const cadre::testing::TemporaryFolder folder;
  std::ofstream(folder.file("odd")) << "odd\n";
  const auto result = run_cadre({"stack", folder.file("odd")});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("odd: it is no crash file of this version"));
  EXPECT_EQ(run_cadre({"stack"}).exit_code, 2);
}

}  // namespace
}  // namespace cadre::cli
