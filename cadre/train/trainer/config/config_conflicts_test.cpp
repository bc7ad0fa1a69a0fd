// Tests the errors for keys whose values contradict each other.
#include <gtest/gtest.h>

#include <string>

#include "cadre/testing/torch/config_files.h"

namespace cadre::train {
namespace {

using testing::ConfigTest;

TEST_F(ConfigTest, ARefusalNamesBothKeysThatDoNotGoTogether) {
  EXPECT_EQ(
      refusal("[schedule]\nwarmup_steps = 100\n", {"run.steps=3"}),
      "config_test.toml:2: schedule.warmup_steps is 100, more than run.steps, which is 3: set "
      "both, or schedule.warmup_steps=-1, which is a tenth of the steps");
  EXPECT_EQ(refusal("", {"run.steps=3"}), "accepted") << "the default must suit any run.steps";
  EXPECT_EQ(refusal("[model]\ncontext = 64\n", {"run.evaluate_tokens=1"}),
            "command line: run.evaluate_tokens is 1; one sample takes model.context + 1 tokens, "
            "which is 65");
  EXPECT_EQ(refusal("[model]\ncontext = 64\n[run]\nevaluate_tokens = 65\n"), "accepted");
  EXPECT_EQ(refusal("", {"model.kind=cnn", "data.kind=synthetic", "run.evaluate_tokens=1"}),
            "accepted")
      << "run.evaluate_tokens must be ignored for images";
}

TEST_F(ConfigTest, AGlobalBatchIsSplitIntoPartsOfEqualSize) {
  EXPECT_EQ(
      refusal("[run]\nglobal_batch_size = 10\n", {"run.accumulate=4"}),
      "config_test.toml:2: run.global_batch_size is 10, which is not a multiple of run.accumulate "
      "(4): the samples of all processes in one step are split into that many parts of "
      "equal size");
  EXPECT_EQ(refusal("[run]\nglobal_batch_size = 12\n", {"run.accumulate=4"}), "accepted");
}

TEST_F(ConfigTest, RefusesModelsOfOtherData) {
  EXPECT_EQ(
      refusal("[model]\nkind = 'gpt'\n[data]\nkind = 'synthetic'\n"),
      "config_test.toml:4: data.kind must be text for model.kind gpt, which predicts the next "
      "token; synthetic has images: use model.kind cnn or mlp");
  EXPECT_EQ(refusal("[model]\nkind = 'cnn'\n"),
            "config_test.toml:2: model.kind cnn classifies images, but data.kind is text: use "
            "data.kind mnist or synthetic, or model.kind gpt or mlp");
  EXPECT_EQ(refusal("[model]\nkind = 'cnn'\n", {"data.kind=mnist"}),
            "command line: data.kind mnist needs data.path: the folder of the idx files");
  EXPECT_EQ(refusal("[optimizer]\nkind = 'sgd'\nmomentum = 0\nnesterov = true\n"),
            "config_test.toml:4: optimizer.nesterov needs optimizer.momentum above 0");
  EXPECT_EQ(refusal("", {"model.kind=mlp", "data.kind=synthetic"}), "accepted");
}

// A dtype that the strategy does not support is an error, because it changes the results. Keys that
// only save memory or time are ignored instead.
TEST_F(ConfigTest, RefusesDtypesUnderStrategiesThatDoNotHaveThem) {
  for (const std::string key : {"parallel.parameter_dtype", "parallel.reduce_dtype"}) {
    for (const std::string strategy : {"single", "ddp", "zero1", "zero2"}) {
      EXPECT_EQ(refusal("", {key + "=bfloat16", "parallel.strategy=" + strategy}),
                "command line: " + key +
                    " is bfloat16, which only parallel.strategy fsdp and hsdp "
                    "support, not " +
                    strategy +
                    ": choose one of them, or float32; "
                    "run.autocast=bfloat16 computes in bfloat16 under every strategy");
    }
    for (const std::string strategy : {"fsdp", "hsdp"}) {
      EXPECT_EQ(refusal("", {key + "=bfloat16", "parallel.strategy=" + strategy}), "accepted");
    }
  }
  EXPECT_EQ(refusal("", {"parallel.reshard=after_backward", "run.autocast=bfloat16"}), "accepted");
}

TEST_F(ConfigTest, ShardsAreMappedUnlessTheyAreInFiles) {
  EXPECT_EQ(shard_form({}), ShardForm::kMapped);
  EXPECT_EQ(shard_form({.offload = "/tmp"}), ShardForm::kGathered);
  EXPECT_EQ(shard_form({.form = "gathered"}), ShardForm::kGathered);
  EXPECT_EQ(refusal("", {"parallel.form=mapped", "parallel.offload=/tmp"}),
            "command line: parallel.form is mapped, but parallel.offload keeps the parameters in "
            "files, from which they are gathered: choose auto, or parallel.offload=none");
}

}  // namespace
}  // namespace cadre::train
