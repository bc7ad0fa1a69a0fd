#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/testing/torch/config_files.h"
#include "cadre/train/trainer/config/config_file.h"

namespace cadre::train {
namespace {

using testing::ConfigTest;

TEST_F(ConfigTest, ReadsFileThenOverrides) {
  const Config config =
      load("[model]\nwidth = 64\n[data]\nsuffixes = ['.c', '.h']\n[optimizer]\nlearning_rate = 1\n",
           {"model.width=96", "data.path=/tmp/a b", "schedule.warmup_steps=7", "model.width=192",
            "optimizer.nesterov=true", "data.suffixes=[\".py\"]"});
  EXPECT_EQ(config.model.width, 192);
  EXPECT_EQ(config.data.path, "/tmp/a b");
  EXPECT_EQ(config.data.suffixes, (std::vector<std::string>{".py"}));
  EXPECT_EQ(config.optimizer.learning_rate, 1.0);
  EXPECT_TRUE(config.optimizer.nesterov);
  EXPECT_EQ(config.schedule.warmup_steps, 7);
}

TEST_F(ConfigTest, RefusesWithLineAndNearestKey) {
  EXPECT_EQ(refusal("[model]\n\nwidht = 64\n"),
            "config_test.toml:3: unknown key 'model.widht'; did you mean 'model.width'?");
  EXPECT_EQ(refusal("[optimiser]\nlearning_rate = 1\n"),
            "config_test.toml:2: unknown key 'optimiser.learning_rate'; did you mean "
            "'optimizer.learning_rate'?");
  EXPECT_EQ(refusal("steps = 3\n"),
            "config_test.toml:1: unknown key 'steps'; did you mean 'run.steps'?");
  for (const std::string text : {"model = 'gpt'\n", "[[model]]\nkind = 'gpt'\n"}) {
    EXPECT_EQ(refusal(text),
              "config_test.toml:1: model is a table: write [model] on a line of its own, and its "
              "keys below");
  }
  EXPECT_EQ(refusal("[run]\nname = '..'\n"),
            "config_test.toml:2: run.name must be a plain folder name, is \"..\"");
  EXPECT_EQ(refusal("[run]\nsteps = 'many'\n"), "config_test.toml:2: run.steps must be an integer");
  EXPECT_EQ(refusal("[run]\nsteps = 1.5\n"), "config_test.toml:2: run.steps must be an integer");
  EXPECT_EQ(refusal("[run]\n# two\nsteps = 0\n"),
            "config_test.toml:3: run.steps must be at least 1, is 0");
  EXPECT_EQ(refusal("[optimizer]\nbeta1 = nan\n"),
            "config_test.toml:2: optimizer.beta1 must be at least 0, is nan");
  EXPECT_EQ(refusal("[model]\nkind = 'rnn'\n"),
            "config_test.toml:2: model.kind must be one of gpt, mlp, cnn, is \"rnn\"");
  EXPECT_EQ(refusal("[model]\nwidth = 100\nheads = 3\n"),
            "config_test.toml:3: model.heads must divide model.width: 3 heads cannot share 100 "
            "features");
  EXPECT_EQ(refusal("[model]\nwidth = \n").substr(0, 19), "config_test.toml:2:");
}

TEST_F(ConfigTest, AKeyWithTooManyPartsIsRefused) {
  std::string endless = "a";
  for (int i = 0; i < 200'000; ++i) endless += ".a";
  EXPECT_EQ(refusal("# one\n" + endless + " = 1\n"),
            "config_test.toml:2: a key has too many parts");
  EXPECT_EQ(refusal("", {"model.width={" + endless + " = 1}"}).substr(0, 46),
            "command line: model.width must be an integer, ");
}

TEST_F(ConfigTest, AFormerKeyIsRefusedByUsersAndReadInSnapshots) {
  EXPECT_EQ(refusal("[run]\nsteps = 3\nbatch_size = 8\n"),
            "config_test.toml:3: run.batch_size is now named run.global_batch_size");
  EXPECT_EQ(refusal("", {"run.batch_size=8"}),
            "command line: run.batch_size is now named run.global_batch_size");
  EXPECT_EQ(parse_config("[run]\nbatch_size = 8\n", "a snapshot").run.global_batch_size, 8);
}

TEST_F(ConfigTest, RefusesOverridesInTheirOwnWords) {
  EXPECT_EQ(refusal("", {"model.with=3"}),
            "command line: unknown key 'model.with'; did you mean 'model.width'?");
  EXPECT_EQ(refusal("", {"model.width"}),
            "command line: 'model.width' is not an override; expected key=value");
  EXPECT_EQ(refusal("", {"model.width=big"}),
            "command line: model.width must be an integer, is 'big'");
  EXPECT_EQ(refusal("", {"model.width=3\nx=4"}),
            "command line: model.width must be an integer, is '3\nx=4'");
  EXPECT_EQ(refusal("", {"run.name=a/b"}),
            "command line: run.name must be a plain folder name, is \"a/b\"");
  EXPECT_EQ(refusal("", {"data.path=/tmp/caf\xe9"}),
            "command line: the value of data.path is not valid UTF-8, which snapshots and metrics "
            "cannot contain: use a text or a path in UTF-8");
}

// The values of a snapshot were valid in the version that wrote it, so they are accepted even if
// the present bounds exclude them.
TEST_F(ConfigTest, TheBoundsOfASnapshotsConfigurationAreThoseOfItsVersion) {
  const std::string text =
      "[run]\nfolder = ''\n[sample]\ntemperature = 1e-39\n[model]\nheads = 0\n";
  EXPECT_EQ(parse_config(text, "a snapshot").model.heads, 0);
}

TEST_F(ConfigTest, AMissingFileIsNamed) {
  try {
    load_config("/none.toml", {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), ::testing::HasSubstr("/none.toml"));
  }
}

TEST_F(ConfigTest, ItsTextIsReadBack) {
  Config config = load("", {"data.suffixes=[\".py\", \"a\\\"b\"]", "sample.prompt=x\ty\n",
                            "optimizer.learning_rate=0.1", "run.seed=123456789012"});
  for (const bool explain : {false, true}) {
    const std::string text = config_text(config, {.explain = explain});
    EXPECT_EQ(config_text(load(text)), config_text(config)) << text;
  }
}

}  // namespace
}  // namespace cadre::train
