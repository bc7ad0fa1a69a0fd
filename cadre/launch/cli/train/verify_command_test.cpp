// Tests the part of `cadre verify` that does not need libtorch: its help, the arguments of the
// trainer, and its exit codes.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/core/trainer_tree.h"

namespace cadre::cli {
namespace {

TEST(Verify, HelpTeachesWithoutATrainer) {
  const auto help = run_cadre({"verify", "--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_TRUE(help.output.starts_with("cadre verify CONFIG.toml")) << help.output;
  for (const char* text : {"--nproc-per-node N ", "--steps K ", "--strategies A,B ", "--dtype D ",
                           "--json FILE ", "Exit code: 0 "}) {
    EXPECT_NE(help.output.find(text), std::string::npos) << text;
  }
  EXPECT_EQ(run_cadre({"help", "verify"}).output, help.output);
}

TEST(Verify, RefusesWhatMakesNoSense) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"verify"}, "no configuration; for example: cadre verify examples/gpt.toml"},
      {{"verify", "nofile.toml"}, "there is no configuration file \"nofile.toml\""},
      {{"verify", "/", "--nproc-per-node=0"},
       "--nproc-per-node 0: expected a number from 1 to 4096, auto, gpu or cpu"},
      {{"verify", "/", "--steps", "0"}, "--steps 0: expected a number of steps, at least 1"},
      {{"verify", "/", "--steps=few"}, "--steps few: expected a number of steps, at least 1"},
      {{"verify", "/", "--dtype", "bfloat16"}, "--dtype bfloat16: expected float32 or float64"},
      {{"verify", "/", "--strategies="}, "--strategies needs a value"},
      {{"verify", "/", "--jsn", "x"}, "unknown option --jsn; did you mean --json?"}};
  for (const auto& [words, sentence] : cases) {
    const auto result = run_cadre(words);
    EXPECT_EQ(result.exit_code, 2) << sentence;
    EXPECT_EQ(result.error, "cadre verify: " + sentence + "\n");
  }
}

// An output path must be checked before the processes start. Otherwise the table of a long
// comparison could be lost at the end.
TEST(Verify, AReportThatCannotBeWrittenIsRefusedFirst) {
  const cadre::testing::TemporaryFolder folder;
  const std::string path = folder.path();
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "--json needs a value"},
      {path, "--json " + path + ": that is a folder; expected the name of a file"},
      {path + "/new/", "--json " + path + "/new/: that is a folder; expected the name of a file"},
      {path + "/no/x",
       "--json " + path + "/no/x: the folder " + path + "/no does not exist; create it first"},
      {path + "/pipe", "--json " + path +
                           "/pipe: that is a pipe, a socket or a device; expected the name of a "
                           "file"}};
  for (const auto& [value, sentence] : cases) {
    const auto verify = run_cadre({"verify", "/", "--json=" + value});
    EXPECT_EQ(verify.exit_code, 2) << sentence;
    EXPECT_EQ(verify.error, "cadre verify: " + sentence + "\n");
    const auto plan = run_cadre({"train", "/", "--plan", "--json=" + value});
    EXPECT_EQ(plan.exit_code, 2) << sentence;
    EXPECT_EQ(plan.error, "cadre train: " + sentence + "\n");
  }
}

using VerifyTree = TrainerTree;

TEST_F(VerifyTree, StartsTheTrainerAsTwoProcessesUnlessToldOtherwise) {
  make_trainer("echo $RANK of $WORLD_SIZE: \"$@\"");
  const auto two = run({"verify", config_, "run.seed=3"});
  EXPECT_EQ(two.exit_code, 0) << two.error;
  EXPECT_NE(two.output.find("[0] 0 of 2: " + config_ + " run.seed=3 --verify\n"), std::string::npos)
      << two.output;
  const auto one = run({"verify", "--json", "x.json", "--nproc-per-node=1", config_, "--dtype",
                        "float64", "--strategies", "ddp,fsdp", "--steps", "7"});
  EXPECT_EQ(one.output, "[0] 0 of 1: " + config_ +
                            " --verify --steps=7 --strategies=ddp,fsdp --dtype=float64 "
                            "--json=x.json\n");
}

TEST_F(VerifyTree, AMissingFileIsFoundAmongTheInstalledExamples) {
  make_trainer("exit 0");
  const std::string examples = folder_ + "/share/cadre/examples";
  std::filesystem::create_directories(examples);
  std::ofstream(examples + "/gpt.toml") << "";
  const auto known = run({"train", "elsewhere/gpt.toml"});
  EXPECT_EQ(known.exit_code, 2);
  EXPECT_NE(known.error.find(
                "there is no configuration file \"elsewhere/gpt.toml\"; the installed example is " +
                examples + "/gpt.toml\n"),
            std::string::npos)
      << known.error;
  const auto unknown = run({"verify", "elsewhere/other.toml"});
  EXPECT_NE(unknown.error.find("there is no configuration file \"elsewhere/other.toml\"\n"),
            std::string::npos)
      << unknown.error;
}

// Each pair is the trainer's exit code and the expected one of `cadre verify`. Only a deviation (4)
// becomes 1.
TEST_F(VerifyTree, ExitCodesTellADeviationFromAFailure) {
  for (const auto& [trainer, command] :
       std::vector<std::pair<int, int>>{{0, 0}, {4, 1}, {2, 2}, {3, 3}, {1, 3}, {77, 77}}) {
    make_trainer("exit " + std::to_string(trainer));
    EXPECT_EQ(run({"verify", config_, "--nproc-per-node", "1"}).exit_code, command) << trainer;
  }
}

// The exit codes 2, 3 and 4 of the trainer mean that it has reported the failure itself. The
// launcher must then not print its own report about the failed rank, which is the one that ended
// first.
TEST_F(VerifyTree, OnlyAFailureThatTheTrainerHasNotReportedIsReported) {
  for (const auto& [code, is_reported] :
       std::vector<std::pair<int, bool>>{{2, true}, {3, true}, {4, true}, {5, false}}) {
    make_trainer("exit " + std::to_string(code));
    const auto result = run({"train", config_, "--nproc-per-node", "2"});
    EXPECT_EQ(result.exit_code, code);
    bool is_quiet = true;
    for (const std::string report : {"] cadre: rank 0 of 2 failed", "] cadre: rank 1 of 2 failed"})
      is_quiet &= result.error.find(report) == std::string::npos;
    EXPECT_EQ(is_quiet, is_reported) << code << ": " << result.error;
  }
}

}  // namespace
}  // namespace cadre::cli
