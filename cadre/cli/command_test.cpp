// The command's own face: help, version, unknown words, `cadre info` and `cadre train`'s beginning.
#include <nlohmann/json.hpp>

#include "cadre/cli/cadre_command_test.h"
#include "cadre/cli/command.h"
#include "cadre/cli/nearest.h"
#include "cadre/cli/torch_finder.h"
#include "cadre/testing/paths.h"
#include "cadre/testing/temporary_folder.h"

namespace cadre::cli {
namespace {

TEST(Command, ShowsHelpAndVersion) {
  const auto help = run_cadre({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* command : {"run", "train", "info"}) {
    EXPECT_NE(help.output.find(std::string("\n  ") + command + " "), std::string::npos) << command;
    const auto own_help = run_cadre({command, "--help"});
    EXPECT_EQ(own_help.exit_code, 0);
    EXPECT_TRUE(own_help.output.starts_with(std::string("cadre ") + command)) << own_help.output;
  }
  EXPECT_TRUE(std::regex_match(run_cadre({"--version"}).output,
                               std::regex("cadre [0-9]+\\.[0-9]+\\.[0-9]+\n")));
  EXPECT_EQ(run_cadre({}).exit_code, 2);
}

TEST(Command, SuggestsTheNearestCommand) {
  const auto typo = run_cadre({"trian"});
  EXPECT_EQ(typo.exit_code, 2);
  EXPECT_EQ(typo.error, "cadre: unknown command \"trian\"; did you mean \"train\"?\n");
  EXPECT_EQ(run_cadre({"frobnicate"}).error,
            "cadre: unknown command \"frobnicate\"; cadre help lists all\n");
}

TEST(Nearest, FindsTypingErrorsOnly) {
  const std::vector<std::string> known{"run", "train", "info"};
  EXPECT_EQ(nearest("rnu", known), "run");
  EXPECT_EQ(nearest("inof", known), "info");
  EXPECT_EQ(nearest("checkpoint", known), "");
}

TEST(Info, SaysTheSameAsTableAndAsJson) {
  const auto table = run_cadre({"info"});
  EXPECT_EQ(table.exit_code, 0);
  const auto json = nlohmann::json::parse(run_cadre({"info", "--json"}).output);
  EXPECT_EQ(json["num_cores"], os::make_native_system()->host().num_cores);
  EXPECT_EQ(json["transport_tcp"], "works");
  EXPECT_EQ(json["transport_shared_memory"], "works");
  EXPECT_NE(table.output.find("TCP                 works\n"), std::string::npos) << table.output;
}

TEST(Info, FindsTorchByItsFiles) {
  const cadre::testing::TemporaryFolder temporary;
  const std::string folder = temporary.path();
  const std::string torch = folder + "/lib/python3.11/site-packages/torch";
  std::filesystem::create_directories(torch);
  std::ofstream(torch + "/version.py")
      << "from typing import Optional\n__all__ = ['__version__', 'debug']\n"
         "__version__ = '2.12.1+cpu'\n";
  os::Environment environment;
  environment.set("CADRE_TORCH", folder + "/bin/python");
  const auto by_python = find_torch(environment);
  ASSERT_TRUE(by_python);
  EXPECT_EQ(by_python->version, "2.12.1+cpu");
  EXPECT_EQ(by_python->folder, torch);
  environment.set("CADRE_TORCH", torch);
  EXPECT_EQ(find_torch(environment)->version, "2.12.1+cpu");
  environment.set("CADRE_TORCH", folder);
  EXPECT_FALSE(find_torch(environment));
}

TEST(Train, ExplainsWhatItNeeds) {
  EXPECT_EQ(run_cadre({"train"}).error,
            "cadre train: no configuration; for example: cadre train examples/gpt.toml\n");
  EXPECT_EQ(run_cadre({"train", "x.toml", "--nproc-per-nod=2"}).error,
            "cadre train: unknown option --nproc-per-nod; did you mean --nproc-per-node?\n");
  EXPECT_EQ(run_cadre({"train", "x.toml", "--nproc-per-node", "none"}).error,
            "cadre train: --nproc-per-node none: expected a number from 1 to 4096\n");
}

// An installed tree with a trainer that is a shell script, or with none.
class TrainTree : public ::testing::Test {
 protected:
  TrainTree() {
    std::filesystem::create_directories(folder_ + "/bin");
    std::filesystem::create_directories(folder_ + "/libexec/cadre");
    std::filesystem::copy_file(testing::build_path("bin/cadre"), folder_ + "/bin/cadre");
  }

  // Runs the copied command under the built one, whose prefix "[0] " is part of the output.
  CommandResult train(std::vector<std::string> words) const {
    std::vector<std::string> all{"run", folder_ + "/bin/cadre", "train"};
    all.insert(all.end(), words.begin(), words.end());
    return run_cadre(all);
  }

  void make_trainer(const std::string& script) const {
    const std::string trainer = folder_ + "/libexec/cadre/cadre-train";
    std::ofstream(trainer) << "#!/bin/sh\n" << script << '\n';
    std::filesystem::permissions(trainer, std::filesystem::perms::owner_all);
  }

  cadre::testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(TrainTree, HelpWithoutATrainerSaysWhyItHasNoKeys) {
  const auto result = train({"--help"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_NE(result.output.find("\n[0]   --nproc-per-node N "), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("[0] The list of keys is the trainer's: the trainer " + folder_ +
                               "/libexec/cadre/cadre-train is not there: this build has no "
                               "libtorch; run `make build`"),
            std::string::npos)
      << result.output;
}

TEST_F(TrainTree, HelpEndsWithTheTrainersKeys) {
  make_trainer("echo \"keys $WORLD_SIZE:\" \"$@\"");
  const auto result = train({"x.toml", "--help", "--nproc-per-node", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_TRUE(result.output.starts_with("[0] cadre train CONFIG.toml")) << result.output;
  EXPECT_TRUE(
      result.output.ends_with("[0] Every key that CONFIG.toml or key=value may set:\n"
                              "[0] \n[0] keys 1: --print-keys\n"))
      << result.output;
}

TEST_F(TrainTree, PassesPrintConfigToOneProcess) {
  make_trainer("echo $RANK of $WORLD_SIZE: \"$@\"");
  const auto result = train({"--print-config", "x.toml", "run.steps=3", "--nproc-per-node", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.output, "[0] 0 of 1: x.toml run.steps=3 --print-config\n");
}

TEST_F(TrainTree, SaysHowToBuildAMissingTrainer) {
  const auto result = train({"x.toml"});
  EXPECT_EQ(result.exit_code, kNotFoundExitCode);
  EXPECT_NE(result.error.find("cadre-train is not there: this build has no libtorch; run `make "
                              "build` with torch installed"),
            std::string::npos)
      << result.error;
}

TEST_F(TrainTree, RunsTheTrainerBesideIt) {
  make_trainer("echo $RANK of $WORLD_SIZE: \"$@\"");
  const auto result = train({"x.toml", "--nproc_per_node", "2", "train.steps=3"});
  EXPECT_EQ(result.exit_code, 0) << result.error;
  // Rank 0 of the trainer has no prefix of its own.
  EXPECT_NE(result.output.find("[0] 0 of 2: x.toml train.steps=3\n"), std::string::npos);
  EXPECT_NE(result.output.find("[0] [1] 1 of 2: x.toml train.steps=3\n"), std::string::npos);
}

}  // namespace
}  // namespace cadre::cli
