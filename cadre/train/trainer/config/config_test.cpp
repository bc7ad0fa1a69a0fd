#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/trainer/config/config_fields.h"
#include "cadre/train/trainer/config/config_file.h"

namespace cadre::train {
namespace {

class ConfigTest : public ::testing::Test {
 protected:
  Config load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    std::ofstream(path_) << text;
    return load_config(path_, overrides);
  }

  // Returns the message of the error, in which the path of the file is replaced by its name.
  std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
      load(text, overrides);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      std::string message = error.message();
      const std::string folder = folder_.file("");
      const size_t at = message.find(folder);
      if (at != std::string::npos) message.erase(at, folder.size());
      return message;
    }
    return "accepted";
  }

  cadre::testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("config_test.toml");
};

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

TEST_F(ConfigTest, ARefusalNamesBothKeysThatDoNotGoTogether) {
  EXPECT_EQ(
      refusal("[schedule]\nwarmup_steps = 100\n", {"run.steps=3"}),
      "config_test.toml:2: schedule.warmup_steps is 100, more than run.steps, which is 3: set "
      "both, or schedule.warmup_steps=-1, which is a tenth of the steps");
  EXPECT_EQ(refusal("", {"run.steps=3"}), "accepted") << "a default goes with any run.steps";
  EXPECT_EQ(refusal("[model]\ncontext = 64\n", {"run.evaluate_tokens=1"}),
            "command line: run.evaluate_tokens is 1; one sample takes model.context + 1 tokens, "
            "which is 65");
  EXPECT_EQ(refusal("[model]\ncontext = 64\n[run]\nevaluate_tokens = 65\n"), "accepted");
  EXPECT_EQ(refusal("", {"model.kind=cnn", "data.kind=synthetic", "run.evaluate_tokens=1"}),
            "accepted")
      << "images have no tokens";
}

TEST_F(ConfigTest, AGlobalBatchIsSplitIntoPartsOfEqualSize) {
  EXPECT_EQ(refusal("[run]\nglobal_batch_size = 10\n", {"run.accumulate=4"}),
            "config_test.toml:2: run.global_batch_size is 10, which run.accumulate, 4, does not "
            "divide: the samples of all processes in one step are split into that many parts of "
            "equal size");
  EXPECT_EQ(refusal("[run]\nglobal_batch_size = 12\n", {"run.accumulate=4"}), "accepted");
}

TEST_F(ConfigTest, AFormerKeyIsRefusedByUsersAndReadInSnapshots) {
  EXPECT_EQ(refusal("[run]\nsteps = 3\nbatch_size = 8\n"),
            "config_test.toml:3: run.batch_size is now named run.global_batch_size");
  EXPECT_EQ(refusal("", {"run.batch_size=8"}),
            "command line: run.batch_size is now named run.global_batch_size");
  EXPECT_EQ(parse_config("[run]\nbatch_size = 8\n", "a snapshot").run.global_batch_size, 8);
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

// Keys that change the results are refused. Keys that only save memory or time are ignored.
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

TEST_F(ConfigTest, ALayoutThatNoNumberOfProcessesHasIsRefused) {
  EXPECT_EQ(refusal("", {"parallel.tensor=2", "parallel.pipeline=2"}), "accepted");
  EXPECT_EQ(refusal("", {"model.experts=8", "parallel.expert=4"}), "accepted");
  EXPECT_EQ(refusal("[model]\nexperts_per_token = 3\nexperts = 2\n"),
            "config_test.toml:2: model.experts_per_token is 3, more than the 2 experts of "
            "model.experts");
  EXPECT_EQ(refusal("", {"model.kind=mlp", "model.experts=2"}),
            "command line: model.experts is 2, but only the gpt has experts, and model.kind is "
            "mlp: choose 0");
  EXPECT_EQ(refusal("", {"parallel.expert=2"}),
            "command line: parallel.expert is 2, but model.experts is 0, so there are no experts "
            "to divide: set model.experts, or leave the key out");
  EXPECT_EQ(refusal("", {"parallel.tensor=3"}),
            "command line: parallel.tensor is 3, which does not divide the 4 heads of "
            "model.heads");
  EXPECT_EQ(refusal("", {"parallel.pipeline=2", "parallel.schedule=1b1f"}),
            "command line: parallel.schedule must be one of gpipe, 1f1b, interleaved-1f1b, "
            "looped-bfs, zb-h1, interleaved-zero-bubble, zb-v, dualpipe-v, is \"1b1f\"");
}

TEST_F(ConfigTest, EveryOptimizerHasItsOwnDefaults) {
  // These are the default learning rates and epsilons of torch.optim.
  const std::map<std::string, std::pair<double, double>> expected = {
      {"adam", {1e-3, 1e-8}},    {"adagrad", {1e-2, 1e-10}}, {"rmsprop", {1e-2, 1e-8}},
      {"adadelta", {1.0, 1e-6}}, {"sgd", {1e-3, 1e-8}},
  };
  for (const auto& [kind, values] : expected) {
    const OptimizerConfig optimizer = load("[optimizer]\nkind = '" + kind + "'\n").optimizer;
    EXPECT_EQ(optimizer.learning_rate, values.first) << kind;
    EXPECT_EQ(optimizer.epsilon, values.second) << kind;
    EXPECT_EQ(optimizer.weight_decay, 0) << kind;
  }
  const Config set = load("[optimizer]\nweight_decay = 0.5\n",
                          {"optimizer.kind=adadelta", "optimizer.learning_rate=0.25"});
  EXPECT_EQ(set.optimizer.weight_decay, 0.5);
  EXPECT_EQ(set.optimizer.learning_rate, 0.25);
  EXPECT_EQ(set.optimizer.epsilon, 1e-6);
  EXPECT_EQ(load("").optimizer.weight_decay, 0.1) << "of adamw";
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

TEST_F(ConfigTest, TextsThatMeanSomethingElseAreRefused) {
  for (const std::string key : {"run.folder", "run.resume", "data.path", "parallel.offload"}) {
    EXPECT_EQ(refusal("", {key + "="}), "command line: " + key + " must not be empty");
    EXPECT_EQ(refusal("", {key + "=a" + std::string(1, '\0') + "b"}),
              "command line: " + key + " must not contain the character NUL");
  }
  EXPECT_EQ(refusal("[run]\nfolder = ''\n"), "config_test.toml:2: run.folder must not be empty");
  EXPECT_EQ(refusal("[run]\nfolder = \"a\\u0000b\"\n"),
            "config_test.toml:2: run.folder must not contain the character NUL");
  EXPECT_EQ(refusal("[run]\nname = \"a\\nb\"\n"),
            "config_test.toml:2: run.name must be a plain folder name, is \"a\\x0ab\"");
  EXPECT_EQ(refusal("", {"run.name="}),
            "command line: run.name must be a plain folder name, is \"\"");
  EXPECT_EQ(refusal("", {"data.suffixes=[\"\"]"}),
            "command line: data.suffixes must not contain an empty text");
  EXPECT_EQ(refusal("", {"data.skipped_folders=['a/b']"}),
            "command line: data.skipped_folders has \"a/b\", which no name of a file or folder "
            "contains");
  EXPECT_EQ(refusal("", {"model.weights=", "sample.prompt="}), "accepted");
  EXPECT_EQ(refusal("[data]\npath = '/tmp/caf\xe9'\n").substr(0, 19), "config_test.toml:2:");
}

TEST_F(ConfigTest, NumbersThatAreNoneOrTooLargeOrTooSmallAreRefused) {
  Config config;
  for (const ConfigField& field : config_fields(config)) {
    if (std::holds_alternative<double*>(field.value)) {
      for (const std::string number : {"nan", "inf", "-inf", "-1", "1e300"}) {
        EXPECT_THAT(refusal("", {field.name + "=" + number}),
                    ::testing::StartsWith("command line: " + field.name + " must be at "))
            << number;
      }
    } else if (std::holds_alternative<int64_t*>(field.value)) {
      for (const std::string number : {"-2", "9223372036854775807", "-9223372036854775808"}) {
        EXPECT_THAT(refusal("", {field.name + "=" + number}),
                    ::testing::StartsWith("command line: " + field.name + " must be at "))
            << number;
      }
      EXPECT_THAT(refusal("", {field.name + "=9223372036854775808"}),
                  ::testing::StartsWith("command line: " + field.name + " must be an integer"));
    }
  }
  EXPECT_EQ(refusal("", {"sample.temperature=1e-39"}),
            "command line: sample.temperature is 1e-39, by which float32 cannot divide: choose 0, "
            "which generates the most likely token each time, or at least 1e-30");
  EXPECT_EQ(refusal("", {"sample.temperature=1e-30"}), "accepted");
}

TEST_F(ConfigTest, ALongUnknownKeyIsComparedQuickly) {
  EXPECT_THAT(refusal("", {"model." + std::string(900'000, 'w') + "=1"}),
              ::testing::HasSubstr("did you mean 'model."));
}

// The version that wrote the snapshot allowed its values, so they are accepted.
TEST_F(ConfigTest, TheBoundsOfASnapshotsConfigurationAreThoseOfItsVersion) {
  const std::string text =
      "[run]\nfolder = ''\n[sample]\ntemperature = 1e-39\n[model]\nheads = 0\n";
  EXPECT_EQ(parse_config(text, "a snapshot").model.heads, 0);
}

TEST_F(ConfigTest, KeysOfAnotherChoiceHaveNoEffect) {
  const auto without_effect = [](Config config) {
    std::vector<std::string> names;
    for (const ConfigField& field : config_fields(config)) {
      if (!has_effect(field.name, config)) names.push_back(field.name);
    }
    return names;
  };
  EXPECT_THAT(
      without_effect(Config()),
      ::testing::ElementsAre(
          "model.window", "model.dropout", "model.experts_per_token", "model.capacity_factor",
          "model.auxiliary_loss", "data.samples", "optimizer.alpha", "optimizer.rho",
          "optimizer.rate_decay", "optimizer.momentum", "optimizer.nesterov", "schedule.step_size",
          "schedule.gamma", "parallel.replicas", "parallel.form", "parallel.reshard",
          "parallel.offload", "parallel.sequence", "parallel.schedule", "parallel.microbatches",
          "parallel.virtual_stages", "parallel.attention"));
  Config images;
  images.model.kind = "cnn";
  images.data.kind = "synthetic";
  images.optimizer.kind = "sgd";
  images.schedule.kind = "step";
  images.parallel.strategy = "hsdp";
  EXPECT_THAT(
      without_effect(images),
      ::testing::ElementsAre(
          "model.layers", "model.heads", "model.width", "model.context", "model.window",
          "model.dropout_rate", "model.tied", "model.experts", "model.experts_per_token",
          "model.capacity_factor", "model.auxiliary_loss", "data.path", "data.suffixes",
          "data.skipped_folders", "optimizer.beta1", "optimizer.beta2", "optimizer.epsilon",
          "optimizer.alpha", "optimizer.rho", "optimizer.rate_decay", "schedule.final_fraction",
          "run.evaluate_tokens", "parallel.sequence", "parallel.schedule", "parallel.microbatches",
          "parallel.virtual_stages", "parallel.attention", "sample.tokens", "sample.prompt",
          "sample.temperature", "sample.top_k"));
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

TEST_F(ConfigTest, EveryFieldHasAMeaningAndAnAllowedDefault) {
  Config config;
  for (const ConfigField& field : config_fields(config)) {
    EXPECT_FALSE(field.meaning.empty()) << field.name;
    EXPECT_EQ(check_value(field), "") << field.name;
    EXPECT_EQ(nearest_key(config_fields(config), field.name), field.name);
  }
}

}  // namespace
}  // namespace cadre::train
