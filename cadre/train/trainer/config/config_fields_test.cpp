// Tests the keys of a configuration: their explanations, defaults and allowed values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "cadre/testing/torch/config_files.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

using testing::ConfigTest;

TEST_F(ConfigTest, EveryOptimizerHasItsOwnDefaults) {
  // The defaults of torch.optim for each kind: learning rate and epsilon.
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
  EXPECT_EQ(load("").optimizer.weight_decay, 0.1) << "the default of adamw must be used";
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
