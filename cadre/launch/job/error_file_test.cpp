#include "cadre/launch/job/error_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::launch {
namespace {

class ErrorFile : public ::testing::Test {
 protected:
  // Reports a failure of rank 1, whose own error file contains `worker_content`, and returns the
  // error file of the job.
  nlohmann::json after(const std::string& worker_content, os::ExitStatus status = {.code = 3}) {
    const std::string worker_file = folder_.file("worker.json");
    if (!worker_content.empty()) std::ofstream(worker_file) << worker_content;
    const std::string path = folder_.file("caller.json");
    write_error_file(path, {.first = {.rank = 1, .pid = 4711, .status = status},
                            .host = "node7",
                            .num_workers = 4,
                            .worker_file = worker_file,
                            .last_lines = {"loading", "no such layer\xff"},
                            .timestamp_s = 1234})
        .value_or_throw();
    return nlohmann::json::parse(std::ifstream(path));
  }

  cadre::testing::TemporaryFolder folder_;
};

TEST_F(ErrorFile, SaysHowAWorkerEndedThatLeftNothing) {
  const auto message = after("")["message"];
  EXPECT_EQ(message["message"], "rank 1 of 4 failed with exit code 3 on node7, pid 4711");
  EXPECT_EQ(message["errorCode"], 3);
  EXPECT_EQ(message["extraInfo"]["timestamp"], "1234");
  EXPECT_EQ(message["extraInfo"]["py_callstack"],
            "rank 1 of 4 failed with exit code 3 on node7, pid 4711\nloading\nno such "
            "layer\xef\xbf\xbd\n");
  EXPECT_EQ(after("", {.signal = SIGSEGV})["message"]["errorCode"], -SIGSEGV);
}

TEST_F(ErrorFile, KeepsWhatTheWorkerLeft) {
  const auto message = after(R"({"message": {"message": "ValueError: x",
                            "extraInfo": {"py_callstack": "Traceback", "timestamp": "99"}}})")
      ["message"];
  EXPECT_EQ(message["message"], "ValueError: x");
  EXPECT_EQ(message["extraInfo"]["py_callstack"], "Traceback");
  EXPECT_EQ(message["extraInfo"]["timestamp"], "99");
  EXPECT_EQ(message["errorCode"], 3);
  EXPECT_EQ(after(R"({"message": "plain", "timestamp": 5})")["message"], "plain");
}

// torchelastic's reader throws if there is no timestamp, so a missing one must be added.
TEST_F(ErrorFile, CompletesWhatTheReaderCouldNotRead) {
  EXPECT_EQ(after(R"({"message": {"message": "ValueError: x"}})")["message"]["message"],
            "rank 1 of 4 failed with exit code 3 on node7, pid 4711: ValueError: x");
  for (const char* broken : {"{", "[]", "3", R"({"message": 3})"}) {
    EXPECT_EQ(after(broken)["message"]["extraInfo"]["timestamp"], "1234") << broken;
  }
}

// Deeply nested values must be left out, because serializing recurses for each level of nesting.
TEST_F(ErrorFile, LeavesOutWhatIsNestedWithoutEnd) {
  constexpr size_t kDepth = 400'000;
  const auto root = after(R"({"message": "x", "timestamp": 5, "deep": )" +
                          std::string(kDepth, '[') + std::string(kDepth, ']') + "}");
  EXPECT_EQ(root["message"], "x");
  EXPECT_EQ(root["timestamp"], 5);
}

TEST_F(ErrorFile, DoesNotWaitAtAPipe) {
  ASSERT_EQ(::mkfifo(folder_.file("worker.json").c_str(), 0600), 0);
  EXPECT_EQ(after("")["message"]["errorCode"], 3);
}

TEST_F(ErrorFile, AFolderThatIsGoneIsAnError) {
  EXPECT_FALSE(write_error_file(folder_.file("gone/caller.json"), {}).ok());
}

}  // namespace
}  // namespace cadre::launch
