#include "cadre/launch/job/failure_report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::launch {
namespace {

WorkerExit worker_exit(int rank, os::ExitStatus status, bool was_asked = false) {
  return {.rank = rank,
          .pid = 1000 + rank,
          .status = status,
          .lifetime = std::chrono::milliseconds(12340),
          .was_asked_to_stop = was_asked};
}

TEST(FailureReport, SaysWhoWhereAndWhy) {
  const std::vector exits{worker_exit(3, {.signal = SIGKILL}), worker_exit(0, {.code = 0}, true),
                          worker_exit(1, {.signal = SIGTERM}, true),
                          worker_exit(2, {.code = 1}, true), worker_exit(4, {.code = 0})};
  EXPECT_EQ(to_text({.failure = exits[0],
                     .host = "node7",
                     .exception = "OutOfMemory: 40 GB\n\x1b[31m",
                     .last_lines = {"step 10", "\x1b[31mred\x07"},
                     .num_workers = 5,
                     .exits = exits,
                     .num_oom_kills = 1}),
            "cadre: the last 2 lines of rank 3:\n"
            "    step 10\n"
            "    \\x1b[31mred\\x07\n"
            "cadre: rank 3 of 5 failed with signal 9 (SIGKILL) on node7, pid 1003, after 12.3 s\n"
            "  meaning: killed, most likely because memory ran out: the kernel killed 1 process of "
            "this machine for that reason during the job. Use a smaller batch or fewer workers\n"
            "  exception: OutOfMemory: 40 GB\\x0a\\x1b[31m\n"
            "  others: rank 2: ended by exit code 1; rank 4: had succeeded; ranks 0-1: "
            "stopped by cadre because rank 3 failed");
}

TEST(FailureReport, ShowsTheStackOfACrash) {
  const std::vector exits{worker_exit(0, {.signal = SIGSEGV})};
  FailureReport report{.failure = exits[0],
                       .host = "node7",
                       .crash = CrashReport{.summary = "SIGSEGV at address 0x10 in f() at x.cpp:3",
                                            .stack = {"#0 f() at x.cpp:3", "#1 main at x.cpp:9"}},
                       .last_lines = {"step 10"},
                       .num_workers = 1,
                       .exits = exits};
  EXPECT_EQ(to_text(report),
            "cadre: the last line of rank 0:\n"
            "    step 10\n"
            "cadre: the stack of rank 0, innermost call first:\n"
            "    #0 f() at x.cpp:3\n"
            "    #1 main at x.cpp:9\n"
            "cadre: rank 0 of 1 failed with signal 11 (SIGSEGV) on node7, pid 1000, after 12.3 s\n"
            "  meaning: invalid memory access\n"
            "  crash: SIGSEGV at address 0x10 in f() at x.cpp:3");
  report.crash->stack.resize(25, "#2 g()");
  EXPECT_NE(to_text(report).find("    and 5 more\ncadre: rank 0"), std::string::npos);
}

TEST(FailureReport, NamesTheInnermostCallOfTheProgram) {
  EXPECT_EQ(place_of({}), "");
  EXPECT_EQ(place_of({"#0 raise in /lib/libc.so.6", "#1 f() in /bin/x", "#2 g() at x.cpp:3"}),
            "g() at x.cpp:3");
  EXPECT_EQ(place_of({"#0 raise in /lib/libc.so.6", "#1 f() in /bin/x"}), "f() in /bin/x");
  EXPECT_EQ(place_of({"#0 raise in /lib/libc.so.6"}), "raise in /lib/libc.so.6");
  EXPECT_EQ(place_of({"#0 abort in /lib/libc.so.6",
                      "#1 cadre::os::(anonymous namespace)::on_terminate() at crash_handler.cpp:7",
                      "#2 __cxa_throw in /lib/libstdc++.so.6", "#3 f() at x.cpp:3"}),
            "f() at x.cpp:3");
}

TEST(FailureReport, RefersToLinesThatWereJustShown) {
  const std::vector exits{worker_exit(0, {.code = 1})};
  FailureReport report{.failure = exits[0],
                       .host = "node7",
                       .last_lines = {"one", "two", "three"},
                       .num_workers = 1,
                       .exits = exits};
  const auto beginning = [&](size_t num_shown) {
    report.num_lines_just_shown = num_shown;
    const std::string text = to_text(report);
    return text.substr(0, text.find("cadre: rank 0"));
  };
  EXPECT_EQ(beginning(0), "cadre: the last 3 lines of rank 0:\n    one\n    two\n    three\n");
  EXPECT_EQ(beginning(1),
            "cadre: the last 3 lines of rank 0, of which the last one is shown above:\n"
            "    one\n    two\n");
  EXPECT_EQ(beginning(2),
            "cadre: the last 3 lines of rank 0, of which the last 2 are shown above:\n    one\n");
  EXPECT_EQ(beginning(3), "cadre: the last 3 lines of rank 0 are shown above\n");
  report.last_lines = {"one"};
  EXPECT_EQ(beginning(1), "cadre: the last line of rank 0 is shown above\n");
}

TEST(FailureReport, NamesThoseThatWereStoppedAtThatTime) {
  std::vector exits{worker_exit(2, {.code = 1}), worker_exit(1, {.signal = SIGTERM}, true),
                    worker_exit(0, {.signal = SIGTERM}, true)};
  const auto end_of_report = [&] {
    const std::string text =
        to_text({.failure = exits[0], .host = "node7", .num_workers = 3, .exits = exits});
    return text.substr(text.rfind('\n') + 1);
  };
  exits[1].stopped_by = SIGSTOP;
  EXPECT_EQ(end_of_report(), "  likely cause: rank 1 was stopped by SIGSTOP when rank 2 failed");
  exits[2].stopped_by = SIGSTOP;
  EXPECT_EQ(end_of_report(),
            "  likely cause: ranks 0-1 were stopped by SIGSTOP when rank 2 failed");
}

TEST(FailureReport, FoldsRanksIntoRanges) {
  EXPECT_EQ(rank_ranges({}), "");
  EXPECT_EQ(rank_ranges(std::vector{4}), "4");
  EXPECT_EQ(rank_ranges(std::vector{0, 1, 2, 5, 7, 8}), "0-2, 5, 7-8");
}

TEST(FailureReport, ReadsOnlyWellFormedErrorFiles) {
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("error.json");
  const auto message_of = [&](const std::string& content) {
    std::ofstream(path) << content;
    return exception_in(path);
  };
  EXPECT_EQ(message_of(R"({"message": {"message": "RuntimeError: x", "extraInfo": {}}})"),
            "RuntimeError: x");
  EXPECT_EQ(message_of(R"({"message": "plain"})"), "plain");
  for (const char* broken : {"", "{", "[]", "3", R"({"message": 3})",
                             R"({"message": {"message": 1}})", R"({"message": {}})"}) {
    EXPECT_EQ(message_of(broken), "") << broken;
  }
  std::filesystem::remove(path);
  EXPECT_EQ(exception_in(path), "");
}

}  // namespace
}  // namespace cadre::launch
