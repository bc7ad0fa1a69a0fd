// Calls `cadre train` as a user does. Tests its help, its messages, and jobs of processes: each
// process has a random generator of its own, unlike ranks that are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/files/locked_file.h"
#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/paths.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(TrainProgram, HelpHasEveryKeyOnce) {
  const cli::CommandResult help = cli::run_cadre({"train", "--help"});
  EXPECT_EQ(help.exit_code, 0) << help.error;
  EXPECT_THAT(help.output, StartsWith("cadre train CONFIG.toml"));
  for (const char* text : {"\n  --nproc-per-node N ", "\n[model]\n", "\n[run]\n", "\nwidth = 128\n",
                           "\nresume = \"none\"\n"}) {
    EXPECT_EQ(count_of(help.output, text), 1U) << text;
  }
}

TEST(TrainProgram, PrintsTheConfigurationOnce) {
  const cli::CommandResult printed =
      cli::run_cadre({"train", testing::source_path("examples/gpt.toml"), "model.width=192",
                      "--print-config", "--nproc-per-node", "2"});
  EXPECT_EQ(printed.exit_code, 0) << printed.error;
  EXPECT_THAT(printed.output, StartsWith("[model]\nkind = \"gpt\"\n"));
  EXPECT_EQ(count_of(printed.output, "\nwidth = 192\n"), 1U) << printed.output;
}

// The model is too large for any machine, and the data file does not exist. A plan must not need
// either of them.
TEST(TrainProgram, PlansWithoutTraining) {
  const testing::TemporaryFolder folder;
  const std::string json = folder.file("plan.json");
  const std::vector<std::string> words = {"train",
                                          testing::source_path("examples/gpt.toml"),
                                          "model.width=18688",
                                          "model.heads=32",
                                          "model.layers=24",
                                          "data.path=/nowhere",
                                          "run.folder=" + folder.path().string(),
                                          "--plan"};
  std::vector<std::string> on_four = words;
  on_four.insert(on_four.end(), {"--nproc-per-node", "4", "--json", json});
  const cli::CommandResult planned = cli::run_cadre(on_four);
  EXPECT_EQ(planned.exit_code, 0) << planned.error;
  EXPECT_THAT(planned.output, AllOf(HasSubstr("\n* ddp "), HasSubstr("\n  hsdp, after_forward "),
                                    HasSubstr("; 4 processes")));
  std::ifstream written(json);
  const std::string text((std::istreambuf_iterator<char>(written)), {});
  EXPECT_THAT(text, AllOf(StartsWith("{"), HasSubstr("\"held_bytes\"")));
  std::vector<std::string> refused_words = words;
  refused_words.insert(refused_words.end(), {"--nproc-per-node", "3", "parallel.strategy=hsdp"});
  const cli::CommandResult refused = cli::run_cadre(refused_words);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(refused.error,
            "cadre-train: parallel.replicas is 2, which does not divide the 3 processes\n");
}

// A mistake in the configuration must be reported with one sentence, for any number of processes
// and whichever of them notices it.
TEST(TrainProgram, AConfigurationThatCannotBeIsRefusedInOneSentence) {
  const testing::TemporaryFolder folder;
  std::ofstream(folder.file("images.toml")) << "[model]\nkind = \"cnn\"\n[data]\nkind = "
                                               "\"synthetic\"\nsamples = 60\n";
  std::filesystem::create_directory(folder.file("taken"));
  auto lock = os::LockedFile::open(folder.file("taken/.lock"), os::LockedFile::kReadableByAll)
                  .value_or_throw();
  ASSERT_TRUE(*lock.try_lock());
  const struct {
    const char* word;
    const char* says;
  } cases[] = {
      {"run.stepz=3", "did you mean 'run.steps'?"},
      {"run.steps=-3", "run.steps"},
      {"run.global_batch_size=1", "run.global_batch_size is 1, the samples of all 2 processes"},
      {"run.resume=best", "no snapshot was marked as the best"},
      {"run.name=taken", "another run writes to "}};
  for (const auto& test : cases) {
    for (const char* num_processes : {"1", "2"}) {
      if (std::string_view(test.word) == "run.global_batch_size=1" && num_processes[0] == '1')
        continue;
      const cli::CommandResult refused =
          cli::run_cadre({"train", folder.file("images.toml"), "--nproc-per-node", num_processes,
                          "run.folder=" + folder.path().string(), test.word});
      EXPECT_EQ(refused.exit_code, 2) << refused.error;
      EXPECT_THAT(refused.error, AllOf(StartsWith("cadre-train: "), HasSubstr(test.says)));
      EXPECT_EQ(count_of(refused.error, "\n"), 1U) << refused.error;
    }
  }
}

class TrainDropout : public ::testing::Test {
 protected:
  TrainDropout() { std::ofstream(folder_.file("empty.toml")); }

  // Trains on two processes. The learning rate is constant, so a short run equals the beginning of
  // a long run.
  cli::CommandResult train(const std::string& run, int num_steps,
                           const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"train", folder_.file("empty.toml"), "--nproc-per-node", "2"};
    for (const char* word : {"model.kind=cnn", "data.kind=synthetic", "data.samples=60",
                             "data.held_out=0.1", "optimizer.kind=adam", "schedule.kind=constant",
                             "schedule.warmup_steps=0", "run.global_batch_size=8"}) {
      words.emplace_back(word);
    }
    words.push_back("run.folder=" + folder_.path().string());
    words.push_back("run.name=" + run);
    words.push_back("run.steps=" + std::to_string(num_steps));
    words.insert(words.end(), more.begin(), more.end());
    return cli::run_cadre(std::move(words));
  }

  std::string bytes_of(const std::string& path) const {
    std::ifstream file(folder_.file(path), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::vector<double> losses_of(const std::string& run) const {
    std::vector<double> losses;
    std::ifstream file(folder_.file(run + "/metrics.jsonl"));
    for (std::string line; std::getline(file, line);) {
      const auto step = nlohmann::json::parse(line);
      if (step.contains("loss")) losses.push_back(step["loss"]);
    }
    return losses;
  }

  testing::TemporaryFolder folder_;
};

TEST_F(TrainDropout, AResumedJobHasTheBitsOfAnUninterruptedOne) {
  const cli::CommandResult whole = train("whole", 6);
  ASSERT_EQ(whole.exit_code, 0) << whole.error;
  ASSERT_EQ(train("parts", 3).exit_code, 0);
  const cli::CommandResult resumed = train("parts", 6, {"run.resume=auto"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.error;
  EXPECT_THAT(resumed.output, HasSubstr("/parts/step-000003\n"));
  for (const std::string file : {"model.safetensors", "optimizer.safetensors"}) {
    const std::string expected = bytes_of("whole/step-000006/" + file);
    EXPECT_FALSE(expected.empty());
    EXPECT_TRUE(bytes_of("parts/step-000006/" + file) == expected) << file;
  }
  EXPECT_EQ(losses_of("whole").size(), 6U);
  EXPECT_EQ(losses_of("parts"), losses_of("whole"));

  // Proves that dropout has an effect in this test: without it, the first step has another loss.
  ASSERT_EQ(train("dry", 1, {"model.dropout=false"}).exit_code, 0);
  EXPECT_NE(losses_of("dry").at(0), losses_of("whole").at(0));
}

}  // namespace
}  // namespace cadre
