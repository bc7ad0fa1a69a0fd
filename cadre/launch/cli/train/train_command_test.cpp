// Tests the options of `cadre run` as options of `cadre train`: they reach the job of the trainer,
// for which a shell script is used, or are refused.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/cadre_command.h"
#include "cadre/testing/core/trainer_tree.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class TrainCommand : public TrainerTree {
 protected:
  // Returns the words that start `cadre train` of this folder as a worker of the built command.
  std::vector<std::string> train(std::vector<std::string> words) const {
    words.insert(words.begin(), {"run", folder_ + "/bin/cadre", "train", config_});
    return words;
  }

  // Runs a job of one worker on this host and two workers on another one.
  std::pair<CommandResult, CommandResult> train_on_two_hosts() const {
    const std::string secret = folder_ + "/job.token";
    std::ofstream(secret) << "the secret of the test\n";
    EXPECT_EQ(::chmod(secret.c_str(), 0600), 0);
    const auto words_for = [&](const char* num_workers) {
      return train({"--nnodes", "2", "--rdzv-backend", "file", "--rdzv-endpoint", folder_,
                    "--rdzv-id=seven", "--token-file", secret, "run.steps=3", "--rdzv-conf",
                    "join_timeout=50", "--max-restarts", "1", "--nproc-per-node", num_workers});
    };
    CadreCommand first(words_for("1"));
    EXPECT_TRUE(first.wait_for("1 of 2 hosts is here\n"));
    CadreCommand second(words_for("2"));
    std::pair results{first.wait(), second.wait()};
    EXPECT_TRUE(first.leaves_nothing() && second.leaves_nothing());
    return results;
  }
};

TEST_F(TrainCommand, TrainsOnTwoHosts) {
  make_trainer("echo $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE: \"$@\"");
  const auto [first, second] = train_on_two_hosts();
  EXPECT_EQ(first.exit_code, 0) << first.error;
  EXPECT_EQ(first.output, "[0] 0 of 3, local 0 of 1: " + config_ + " run.steps=3\n");
  EXPECT_EQ(second.exit_code, 0) << second.error;
  const std::string words = ": " + config_ + " run.steps=3\n";
  EXPECT_THAT(second.output, HasSubstr("[0] [1] 1 of 3, local 0 of 2" + words));
  EXPECT_THAT(second.output, HasSubstr("[0] [2] 2 of 3, local 1 of 2" + words));
}

TEST_F(TrainCommand, AWrongConfigurationEndsTheJobOfTwoHostsWithoutARestart) {
  make_trainer("[ $RANK = 2 ] && exit 2; exec sleep 1000");
  const auto [first, second] = train_on_two_hosts();
  EXPECT_EQ(first.exit_code, 1);
  EXPECT_EQ(second.exit_code, 2);
  EXPECT_THAT(first.error, HasSubstr("ended with exit code 2"));
  EXPECT_THAT(first.error, Not(HasSubstr("round 2 starts")));
}

TEST_F(TrainCommand, TheOptionsOfRunReachTheJob) {
  make_trainer("exit 0");
  const CommandResult planned = run_cadre(train(
      {"--dry-run", "--max-restarts=3", "--rdzv-id", "seven", "--role", "learner", "run.steps=3"}));
  EXPECT_EQ(planned.exit_code, 0) << planned.error;
  EXPECT_THAT(planned.output, HasSubstr("cadre-train " + config_ + " run.steps=3\n"));
  for (const char* variable :
       {"TORCHELASTIC_MAX_RESTARTS=3", "TORCHELASTIC_RUN_ID=seven", "ROLE_NAME=learner"}) {
    EXPECT_THAT(planned.output, HasSubstr(variable)) << planned.output;
  }
  const CommandResult logged = run_cadre(train({"--log-dir", folder_ + "/logs", "--tee", "3"}));
  EXPECT_THAT(logged.error, HasSubstr("log files are in " + folder_ + "/logs/")) << logged.error;
}

TEST_F(TrainCommand, RefusesWhatMakesNoJob) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"--nnodes", "2"},
       "a job on several hosts needs --master-addr HOST, an address of the host with --node-rank "
       "0, or --rdzv-backend c10d with --rdzv-endpoint HOST:PORT"},
      {{"--nnodes=1:2", "--master-addr=127.0.0.1"},
       "--nnodes 1:2 needs --rdzv-backend c10d, because a static rendezvous has a fixed number of "
       "hosts"},
      {{"--nnodes", "2", "--master-addr=127.0.0.1", "--plan"},
       "--plan computes the memory of processes on one host, and not of 2: give --nnodes 1"},
      {{"--max-restarts=-1"}, "--max-restarts -1: expected a number of restarts, from 0"},
      {{"--nproc-per-node", "none"},
       "--nproc-per-node none: expected a number from 1 to 4096, auto, gpu or cpu"},
      {{"--no-python"}, "unknown option --no-python; cadre train --help lists all"},
      {{"-m"}, "unknown option -m; cadre train --help lists all"}};
  for (const auto& [options, sentence] : cases) {
    std::vector<std::string> words{"train", config_};
    words.insert(words.end(), options.begin(), options.end());
    const CommandResult result = run_cadre(words);
    EXPECT_EQ(result.exit_code, 2) << sentence;
    EXPECT_EQ(result.error, "cadre train: " + sentence + "\n");
  }
}

TEST_F(TrainCommand, HelpHasALineForTwoHosts) {
  const CommandResult help = run_cadre({"run", folder_ + "/bin/cadre", "train", "--help"});
  EXPECT_THAT(help.output, HasSubstr("--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d"));
}

}  // namespace
}  // namespace cadre::cli
