// Tests which keys have an effect in a given configuration.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/testing/torch/config_files.h"
#include "cadre/train/trainer/config/config_fields.h"

namespace cadre::train {
namespace {

using testing::ConfigTest;

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

}  // namespace
}  // namespace cadre::train
