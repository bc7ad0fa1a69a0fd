// Calls `cadre verify` as a user does, with several processes. Tests its table, its JSON report,
// and its exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class VerifyProgram : public ::testing::Test {
 protected:
  // Runs `cadre verify` with examples/gpt.toml on two processes, with a model of one layer and one
  // step.
  cli::CommandResult verify(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {"verify", testing::source_path("examples/gpt.toml")};
    for (const char* word : {"model.layers=1", "model.width=32", "model.context=32",
                             "run.global_batch_size=6", "run.folder=/nonexistent"}) {
      words.emplace_back(word);
    }
    words.push_back("data.path=" + testing::source_path("examples/gpt.toml"));
    words.emplace_back("data.held_out=0.3");
    words.insert(words.end(), more.begin(), more.end());
    return cli::run_cadre(std::move(words));
  }
  nlohmann::json report() const { return nlohmann::json::parse(std::ifstream(json_)); }

  testing::TemporaryFolder folder_;
  const std::string json_ = folder_.file("report.json");
};

TEST_F(VerifyProgram, EveryStrategyTrainsTheExampleAsOneProcessDoes) {
  const cli::CommandResult verified = verify({"--steps", "2", "--json", json_});
  EXPECT_EQ(verified.exit_code, 0) << verified.output << verified.error;
  EXPECT_THAT(verified.output,
              AllOf(StartsWith("gpt of "), HasSubstr("; 2 steps of 6 samples in float32\n"),
                    HasSubstr("\n  one process: 2 steps\n"),
                    HasSubstr("\n  fsdp/after_forward on 2 processes: 2 steps (7 of 17)\n"),
                    HasSubstr("17 of 17 strategies train as one process does\n"
                              "Layouts that are not among them, and the change that they need:\n"
                              "  with model.layers=2: ddp/pp-2\n")));
  const nlohmann::json json = report();
  EXPECT_EQ(json["is_within"], true);
  EXPECT_EQ(json["world_size"], 2);
  EXPECT_EQ(json["num_steps"], 2);
  ASSERT_EQ(json["strategies"].size(), 17U);
  for (const auto& strategy : json["strategies"]) {
    EXPECT_EQ(strategy["verdict"], "within") << strategy;
    EXPECT_LE(strategy["gradients"]["difference"], 1e-5) << strategy;
    EXPECT_GT(strategy["parameters"]["bound"], 0) << strategy;
    EXPECT_FALSE(strategy["parameters"]["name"].get<std::string>().empty()) << strategy;
  }
}

TEST_F(VerifyProgram, Float64IsABillionTimesCloser) {
  const cli::CommandResult verified =
      verify({"--steps=1", "--dtype=float64", "--strategies=zero2,fsdp/after_backward", "--json",
              json_, "optimizer.kind=sgd"});
  EXPECT_EQ(verified.exit_code, 0) << verified.output << verified.error;
  std::vector<std::string> names;
  const nlohmann::json json = report();
  for (const auto& strategy : json["strategies"]) {
    names.push_back(strategy["strategy"]);
    EXPECT_LE(strategy["gradients"]["difference"], 1e-12) << strategy;
    EXPECT_EQ(strategy["gradients"]["bound"], 1e-10) << strategy;
  }
  EXPECT_THAT(names, ElementsAre("zero2", "zero2/accumulate", "fsdp/after_backward",
                                 "fsdp/after_backward/accumulate"));
}

// Training in float32 is chaotic with this learning rate, so rounding exceeds every bound, as a
// defect would.
TEST_F(VerifyProgram, ADeviationHasAnExitCodeOfItsOwn) {
  const std::vector<std::string> unstable{"--steps",
                                          "15",
                                          "--strategies",
                                          "ddp/accumulate",
                                          "optimizer.kind=rmsprop",
                                          "schedule.kind=constant",
                                          "schedule.warmup_steps=0",
                                          "optimizer.learning_rate=1",
                                          "optimizer.clip_norm=0"};
  const cli::CommandResult deviates = verify(unstable);
  EXPECT_EQ(deviates.exit_code, 1) << deviates.output << deviates.error;
  EXPECT_THAT(deviates.output,
              AllOf(HasSubstr("  deviates\n    "), HasSubstr(" from the reference, bound "),
                    HasSubstr("1 of 1 strategies do not train as one process does\n  --dtype ")));
  EXPECT_EQ(deviates.error, "");
}

// A layout that could not run must not count as verified, so the command must fail.
TEST_F(VerifyProgram, ALayoutThatCannotRunIsReportedAndIsNoSuccess) {
  const cli::CommandResult verified =
      verify({"--steps=1", "--strategies=ddp/pp-2", "--json", json_, "model.layers=2",
              "parallel.pipeline=2", "parallel.microbatches=4"});
  EXPECT_EQ(verified.exit_code, 1) << verified.output << verified.error;
  EXPECT_THAT(verified.output,
              AllOf(HasSubstr("  not run\n    parallel.microbatches is 4, which does not divide"),
                    HasSubstr("0 of 1 strategies train as one process does\n"
                              "1 of 1 could not be run\n"
                              "17 more were not selected by --strategies\n")));
  EXPECT_EQ(report()["strategies"][0]["verdict"], "not run");
  EXPECT_EQ(report()["is_within"], false);
}

TEST_F(VerifyProgram, AWrongRequestIsOneSentenceWithExitCode2) {
  const cli::CommandResult unknown = verify({"--strategies", "zero3"});
  EXPECT_EQ(unknown.exit_code, 2) << unknown.output;
  EXPECT_EQ(unknown.error.find("cadre-train: no strategy \"zero3\" for 2 processes; there are: "),
            0U)
      << unknown.error;
  EXPECT_EQ(std::ranges::count(unknown.error, '\n'), 1) << unknown.error;
  EXPECT_EQ(verify({"run.global_batch_size=1"}).exit_code, 2);
}

}  // namespace
}  // namespace cadre
