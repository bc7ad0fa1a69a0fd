// Tests the `cadre` command itself: help, version, unknown words, `cadre info`, and the errors of
// `cadre train` before the trainer starts.
#include <nlohmann/json.hpp>
#include <sstream>

#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/torch_finder.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/core/trainer_tree.h"

namespace cadre::cli {
namespace {

TEST(Command, ShowsHelpAndVersion) {
  const auto help = run_cadre({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* command : {"run", "train", "info", "doctor", "tune"}) {
    EXPECT_NE(help.output.find(std::string("\n  ") + command + " "), std::string::npos) << command;
    const auto own_help = run_cadre({command, "--help"});
    EXPECT_EQ(own_help.exit_code, 0);
    EXPECT_TRUE(own_help.output.starts_with(std::string("cadre ") + command)) << own_help.output;
    EXPECT_EQ(run_cadre({"help", command}).output, own_help.output);
  }
  EXPECT_EQ(run_cadre({"help"}).output, help.output);
  EXPECT_EQ(run_cadre({"help", "--help"}).output, help.output);
  EXPECT_EQ(run_cadre({"-h", "-h"}).output, help.output);
  EXPECT_EQ(run_cadre({"help", "trian"}).error,
            "cadre: unknown command \"trian\"; did you mean \"train\"?\n");
  EXPECT_TRUE(std::regex_match(run_cadre({"--version"}).output,
                               std::regex("cadre [0-9]+\\.[0-9]+\\.[0-9]+\n")));
  EXPECT_EQ(run_cadre({}).exit_code, 2);
}

// The output is lost if the disk is full or the descriptor is closed. The exit code must then be an
// error.
TEST(Command, NoticesThatItsOutputIsLost) {
  const std::vector<std::vector<std::string>> commands{{"info"},
                                                       {"info", "--json"},
                                                       {"help"},
                                                       {"--version"},
                                                       {"run", "--help"},
                                                       {"trace", "--help"},
                                                       {"train", "--help"},
                                                       {}};
  for (const std::string redirection : {">/dev/full", ">&-"}) {
    for (const auto& words : commands) {
      const auto result = CadreCommand(words, {.shell = "exec \"$@\" " + redirection}).wait();
      const std::string name = words.empty() ? "nothing" : words.front();
      EXPECT_EQ(result.exit_code, words.empty() ? 2 : 1) << name << redirection;
      EXPECT_NE(result.error.find("standard output: "), std::string::npos)
          << name << redirection << result.error;
      EXPECT_EQ(result.error.find('\n'), result.error.size() - 1) << result.error;
    }
  }
}

TEST(Command, AJobWithoutAnOutputSaysThatItsLinesAreLost) {
  const auto result = CadreCommand(shell_job(2, "echo x"), {.shell = "exec \"$@\" >&-"}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.error.find("standard output: "), std::string::npos) << result.error;
  const auto silent = CadreCommand(shell_job(2, "true"), {.shell = "exec \"$@\" <&- >&-"}).wait();
  EXPECT_EQ(silent.exit_code, 0) << silent.error;
  EXPECT_EQ(silent.error, "");
}

TEST(Command, SuggestsTheNearestCommand) {
  const auto typo = run_cadre({"trian"});
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_EQ(typo.error, "cadre: unknown command \"trian\"; did you mean \"train\"?\n");
  EXPECT_EQ(run_cadre({"frobnicate"}).error,
            "cadre: unknown command \"frobnicate\"; cadre help lists all\n");
}

// Parses a text such as "1.5 GiB" into bytes.
double bytes_of(const std::string& text) {
  std::istringstream words(text);
  double count = 0;
  std::string unit;
  words >> count >> unit;
  for (const char* larger : {"KiB", "MiB", "GiB"}) {
    count *= 1024;
    if (unit == larger) return count;
  }
  return -1;
}

// Expects that a row of the table has the same value as the JSON output.
void expect_same(const std::string& key, const nlohmann::json& value, const std::string& text) {
  if (value.is_null()) {
    EXPECT_EQ(text, "no limit") << key;
  } else if (value.is_string()) {
    EXPECT_EQ(text, value.get<std::string>()) << key;
  } else if (key == "available_memory_bytes") {  // this value changes between two calls
    EXPECT_GT(bytes_of(text), 0) << text;
  } else if (key.ends_with("_bytes")) {
    const double bytes = value;
    EXPECT_NEAR(bytes_of(text), bytes, 0.06 * bytes)
        << key << ": " << text;  // "1.0 GiB" is a rounded number
  } else if (value.is_number_float()) {
    EXPECT_EQ(text, cadre::format("{:.1f}", value.get<double>())) << key;
  } else {
    EXPECT_EQ(text, cadre::format("{}", value.get<uint64_t>())) << key;
  }
}

TEST(Info, SaysTheSameAsTableAndAsJson) {
  constexpr size_t kTitleWidth = 20;
  const auto table = run_cadre({"info"});
  EXPECT_EQ(table.exit_code, 0);
  const auto json = nlohmann::ordered_json::parse(run_cadre({"info", "--json"}).output);
  std::istringstream lines(table.output);
  for (const auto& [key, value] : json.items()) {
    std::string line;
    ASSERT_TRUE(std::getline(lines, line)) << "no row for " << key;
    ASSERT_GT(line.size(), kTitleWidth) << line;
    expect_same(key, value, line.substr(kTitleWidth));
  }
  std::string line;
  EXPECT_FALSE(std::getline(lines, line)) << "not in the JSON: " << line;

  const auto system = os::make_native_system();
  EXPECT_EQ(json["host"], system->host().name);
  EXPECT_EQ(json["num_cores"], system->host().num_cores);
  EXPECT_GT(json["total_memory_bytes"], 1 << 20);
  EXPECT_EQ(json["transport_tcp"], "works");
  EXPECT_EQ(json["transport_shared_memory"], "works");
}

TEST(Info, SaysWhereItLookedForTorchInVain) {
  const auto result = run_cadre({"info"}, {{"CADRE_TORCH", "/no/such/torch"}});
  EXPECT_NE(
      result.output.find("not found: CADRE_TORCH=/no/such/torch has no torch; set CADRE_TORCH to "),
      std::string::npos)
      << result.output;
}

TEST(Train, ExplainsWhatItNeeds) {
  EXPECT_EQ(run_cadre({"train"}).error,
            "cadre train: no configuration; for example: cadre train examples/gpt.toml\n");
  EXPECT_EQ(run_cadre({"train", "x.toml", "--nproc-per-nide=2"}).error,
            "cadre train: unknown option --nproc-per-nide; did you mean --nproc-per-node?\n");
}

TEST(Train, LooksForTheConfigurationBeforeAnythingStarts) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"train", "nofile.toml", "--nproc-per-node", "2"},
       "there is no configuration file \"nofile.toml\""},
      {{"train", "/", "run.steps=3"}, "\"/\" is a folder, not a configuration file"},
      {{"train", "run.steps=3"},
       "no configuration before run.steps=3; for example: cadre train examples/gpt.toml "
       "run.steps=3"}};
  for (const auto& [words, sentence] : cases) {
    const auto result = run_cadre(words);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.error, "cadre train: " + sentence + "\n");
  }
}

// Returns the end of the error if the trainer does not exist. Its remedy depends on whether this
// build has libtorch.
std::string missing_trainer() {
  return built_with_torch() ? "only a part of Cadre was built or installed; install all of it"
                            : "this build has no libtorch; run `make build`";
}

TEST_F(TrainerTree, HelpWithoutATrainerSaysWhyItHasNoKeys) {
  const auto result = run({"train", "--help"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("\n[0]   --nproc-per-node N "), std::string::npos) << result.output;
  EXPECT_NE(result.output.find(
                "[0] The trainer, which lists the keys, is not available: the trainer " + folder_ +
                "/libexec/cadre/cadre-train does not exist: " + missing_trainer()),
            std::string::npos)
      << result.output;
}

TEST_F(TrainerTree, HelpEndsWithTheTrainersKeys) {
  make_trainer("echo \"keys $WORLD_SIZE:\" \"$@\"");
  const auto result = run({"train", "x.toml", "--help", "--nproc-per-node", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(result.output.starts_with("[0] cadre train CONFIG.toml")) << result.output;
  EXPECT_TRUE(
      result.output.ends_with("[0] Every key that CONFIG.toml or key=value may set:\n"
                              "[0] \n[0] keys 1: --print-keys\n"))
      << result.output;
}

TEST_F(TrainerTree, PassesPrintConfigToOneProcess) {
  make_trainer("echo $RANK of $WORLD_SIZE: \"$@\"");
  const auto result =
      run({"train", "--print-config", config_, "run.steps=3", "--nproc-per-node", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[0] 0 of 1: " + config_ + " run.steps=3 --print-config\n");
}

TEST_F(TrainerTree, PassesThePlanOfAllProcessesToOne) {
  make_trainer("echo $RANK of $WORLD_SIZE: \"$@\"");
  const auto result =
      run({"train", config_, "--plan", "--nproc-per-node", "4", "--json", "a.json", "run.steps=3"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[0] 0 of 1: " + config_ + " run.steps=3 --plan=4 --json=a.json\n");
  const auto refused = run({"train", config_, "--json", "a.json"});
  EXPECT_EQ(refused.exit_code, kUsageExitCode);
  EXPECT_NE(refused.error.find("--json a.json needs --plan"), std::string::npos) << refused.error;
}

TEST_F(TrainerTree, SaysHowToGetAMissingTrainer) {
  const auto result = run({"train", config_});
  EXPECT_EQ(result.exit_code, kNotFoundExitCode);
  EXPECT_NE(result.error.find("cadre-train does not exist: " + missing_trainer()),
            std::string::npos)
      << result.error;
}

TEST_F(TrainerTree, RunsTheTrainerBesideIt) {
  make_trainer("echo $RANK of $WORLD_SIZE: \"$@\"");
  const auto result = run({"train", config_, "--nproc_per_node", "2", "train.steps=3"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  // Rank 0 of the trainer adds no prefix of its own to its lines.
  EXPECT_NE(result.output.find("[0] 0 of 2: " + config_ + " train.steps=3\n"), std::string::npos);
  EXPECT_NE(result.output.find("[0] [1] 1 of 2: " + config_ + " train.steps=3\n"),
            std::string::npos);
}

TEST(CommandText, WrapsAtWordsAndKeepsLongOnesWhole) {
  EXPECT_EQ(wrapped("one two", "  "), "  one two\n");
  EXPECT_EQ(wrapped("", "  "), "  \n");
  const std::string long_word(kTextWidth, 'x');
  EXPECT_EQ(wrapped("one " + long_word + " two", "> "), "> one\n> " + long_word + "\n> two\n");
  const std::string half(kTextWidth / 2 - 2, 'x');
  EXPECT_EQ(wrapped(half + " " + half + " y", " "), " " + half + " " + half + " y\n");
  EXPECT_EQ(wrapped(half + " " + half + " yyy", " "), " " + half + " " + half + "\n yyy\n");
}

TEST(CommandText, SizesHaveOneDecimal) {
  EXPECT_EQ(readable_size(512), "0.5 KiB");
  EXPECT_EQ(readable_size(64 << 20), "64.0 MiB");
  EXPECT_EQ(readable_size(uint64_t{3} << 29), "1.5 GiB");
}

}  // namespace
}  // namespace cadre::cli
