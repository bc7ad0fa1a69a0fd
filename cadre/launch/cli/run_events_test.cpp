// Tests the events that `cadre run` writes.
#include <gmock/gmock.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;

// Returns "SOURCE STATE rank exit-code restarts" for each line of the text; "-" stands for null.
std::vector<std::string> summaries(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto event = nlohmann::json::parse(line);
    const auto& metadata = event["metadata"];
    const auto details = nlohmann::json::parse(metadata["metadata"].get<std::string>());
    const auto shown = [](const nlohmann::json& value) {
      return value.is_null() ? std::string("-") : value.dump();
    };
    const auto code = details.contains("exit_code") ? details["exit_code"][0] : nlohmann::json();
    all.push_back(cadre::format(
        "{} {} {} {} {}", event["source"].get<std::string>(), metadata["state"].get<std::string>(),
        shown(metadata["global_rank"]), shown(code), shown(metadata["agent_restarts"])));
  }
  return all;
}

TEST(RunEvents, AFileGetsTheEventsOfEachAttempt) {
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("events.jsonl");
  const auto result = run_cadre(
      {"run", "--event-log-handler", path, "--max-restarts", "1", "sh", "-c",
       "echo why >$TORCHELASTIC_ERROR_FILE; exit $((7 - 7 * TORCHELASTIC_RESTART_COUNT))"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  const std::string text = *os::read_file(path, 1 << 20);
  EXPECT_EQ(summaries(text),
            (std::vector<std::string>{"AGENT RENDEZVOUS - - 0", "WORKER START 0 - 0",
                                      "WORKER FAILED 0 7 0", "AGENT RENDEZVOUS - - 1",
                                      "AGENT RESTART - - 1", "WORKER START 0 - 1",
                                      "WORKER SUCCEEDED 0 0 1", "AGENT SUCCEEDED - - 1"}));
  EXPECT_THAT(text, HasSubstr("\"raw_error\":\"why\\n\""));
}

TEST(RunEvents, TheConsoleIsStandardErrorAndAStoppedWorkerIsTerminated) {
  const auto result =
      run_cadre({"run", "--nproc-per-node", "2", "--event-log-handler", "console", "sh", "-c",
                 "if [ $RANK = 1 ]; then kill -KILL $$; fi; sleep 1000"});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  std::string events;
  std::istringstream lines(result.error);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{")) events += line + "\n";
  }
  EXPECT_EQ(summaries(events),
            (std::vector<std::string>{"AGENT RENDEZVOUS - - 0", "WORKER START 0 - 0",
                                      "WORKER START 1 - 0", "WORKER FAILED 1 -9 0",
                                      "WORKER TERMINATED 0 -15 0", "AGENT FAILED - - 0"}));
}

TEST(RunEvents, AJobThatCannotStartHasFailed) {
  const auto system = os::make_native_system();
  const auto taken = system->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("events");
  const std::string port = cadre::format("{}", taken->address().port);
  EXPECT_EQ(
      run_cadre({"run", "--master-port", port, "--event-log-handler", path, "true"}).exit_code, 1);
  EXPECT_EQ(summaries(*os::read_file(path, 1 << 20)),
            std::vector<std::string>{"AGENT FAILED - - 0"});
}

TEST(RunEvents, AJobWhoseProgramCannotBeExecutedHasFailed) {
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("events");
  const std::string program = folder.file("program");
  std::ofstream(program) << "#!/no/such/interpreter\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  EXPECT_NE(run_cadre({"run", "--event-log-handler", path, program}).exit_code, 0);
  EXPECT_EQ(summaries(*os::read_file(path, 1 << 20)),
            std::vector<std::string>{"AGENT FAILED - - 0"});
}

// The limit of a file's size has the effect of a full disk.
TEST(RunEvents, AFileThatCannotBeWrittenIsNamedAndTheJobContinues) {
  const cadre::testing::TemporaryFolder folder;
  const auto result = CadreCommand({"run", "--nproc-per-node", "4", "--event-log-handler",
                                    folder.file("events"), "sh", "-c", "echo hello"},
                                   {.shell = "ulimit -f 1; exec \"$@\""})
                          .wait();
  EXPECT_THAT(result.output, HasSubstr("[3] hello\n"));
  EXPECT_EQ(result.exit_code, 1);
  const std::string told = "further events are not written to this file";
  EXPECT_THAT(result.error, HasSubstr(told));
  EXPECT_EQ(result.error.find(told), result.error.rfind(told)) << "said twice";
}

}  // namespace
}  // namespace cadre::cli
