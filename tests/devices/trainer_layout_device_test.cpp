// Runs layouts of the trainer on the late device. The truth is the same layout on the CPU, with
// other strategies of the same model in between. cadre/train/trainer/trainer_layout_test.cpp
// compares the layouts on the CPU with one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "trainer_on_devices.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;

struct LayoutOnDevices {
  std::string name;
  int num_processes = 1;
  ParallelConfig parallel = {};
  std::string optimizer = "sgd";
  std::string recomputed = "none";
  std::string autocast = "float32";
  int64_t num_parts = 1;  // run.accumulate
  bool is_tied = true;
  int64_t num_experts = 0;
};

std::ostream& operator<<(std::ostream& out, const LayoutOnDevices& layout) {
  return out << layout.name;
}

std::vector<LayoutOnDevices> layouts_on_devices() {
  return {
      {"ddp", 3, {}, "adamw", "blocks"},
      {"zero1", 3, {.strategy = "zero1"}, "adamw", "none", "float32", 2},
      {"zero2", 3, {.strategy = "zero2"}, "rmsprop", "none", "float32", 2},
      {"fsdp", 3, {.strategy = "fsdp"}, "adadelta", "blocks", "float32", 2},
      {"fsdp_gathered", 2, {.strategy = "fsdp", .form = "gathered", .reshard = "after_backward"}},
      {"hsdp", 4, {.strategy = "hsdp", .replicas = 2}},
      {"tensor_sequence", 2, {.strategy = "single", .tensor = 2, .sequence = true}},
      {"ddp_tensor", 4, {.tensor = 2}, "sgd", "blocks"},
      {"zero1_tensor", 4, {.strategy = "zero1", .tensor = 2}},
      {"zero2_tensor", 4, {.strategy = "zero2", .tensor = 2}, "sgd", "none", "float32", 1, false},
      {"fsdp_tensor", 4, {.strategy = "fsdp", .tensor = 2}},
      {"pipeline", 2, {.pipeline = 2}, "adamw"},
      {"pipeline_zb_v", 2, {.pipeline = 2, .schedule = "zb-v", .virtual_stages = 2}},
      {"ddp_pipeline", 4, {.pipeline = 2}},
      {"fsdp_pipeline", 4, {.strategy = "fsdp", .pipeline = 2}},
      {"pipeline_tensor", 4, {.tensor = 2, .pipeline = 2}},
      {"context", 2, {.context = 2}},
      {"fsdp_context", 4, {.strategy = "fsdp", .context = 2, .attention = "all_to_all"}},
      {"expert", 2, {.expert = 2}, "sgd", "none", "float32", 1, true, 4},
      {"fsdp_expert", 4, {.strategy = "fsdp", .expert = 2}, "sgd", "blocks", "float32", 1, true, 4},
  };
}

class TrainerLayoutOnDevicesTest : public TrainerOnDevices {
 protected:
  Config config_of(const LayoutOnDevices& layout, const std::string& name) const {
    Config config = this->config(name);
    config.model = {.layers = 2 * layout.parallel.virtual_stages,
                    .heads = 2,
                    .width = 8,
                    .context = 8,
                    .dropout_rate = 0.1,
                    .tied = layout.is_tied,
                    .experts = layout.num_experts,
                    .checkpoint_activations = layout.recomputed};
    config.optimizer = default_optimizer(layout.optimizer);
    // RMSprop divides by the magnitude of a gradient, also of one that is only rounding.
    if (layout.optimizer == "rmsprop") config.optimizer.epsilon = 1e-2;
    config.parallel = layout.parallel;
    config.schedule = {.kind = "constant", .warmup_steps = 0};
    config.run.autocast = layout.autocast;
    config.run.accumulate = layout.num_parts;
    config.run.steps = 3;
    config.run.global_batch_size = 8;
    config.run.evaluate_tokens = 100;
    config.sample.tokens = 2;
    return config;
  }

  std::vector<double> numbers(const std::string& run_name, const std::string& key) const {
    std::vector<double> numbers;
    for (const nlohmann::json& line : metrics(run_name)) {
      if (line.contains(key)) numbers.push_back(line[key]);
    }
    return numbers;
  }

  void expect_numbers(const std::string& name, const std::string& expected, double bound) const {
    for (const std::string key : {"loss", "gradient_norm", "held_out_loss"}) {
      const std::vector<double> found = numbers(name, key);
      const std::vector<double> truth = numbers(expected, key);
      ASSERT_EQ(found.size(), truth.size());
      ASSERT_FALSE(found.empty());
      for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], truth[i], bound) << key;
    }
  }

  // Rounding decides the sign of a gradient that is close to zero, and with it the first steps of
  // optimizers that divide by the gradient's magnitude. So the mean of the difference is compared.
  void expect_weights(const std::string& name, const std::string& expected, int64_t step) const {
    for (const std::string file : {"model.safetensors", "optimizer.safetensors"}) {
      const std::vector<NamedTensor> found = tensors(name, step, file);
      const std::vector<NamedTensor> truth = tensors(expected, step, file);
      ASSERT_EQ(found.size(), truth.size()) << file;
      for (size_t i = 0; i < truth.size(); ++i) {
        EXPECT_EQ(found[i].name, truth[i].name);
        ASSERT_EQ(found[i].tensor.sizes(), truth[i].tensor.sizes()) << truth[i].name;
        const auto difference = (found[i].tensor.to(torch::kDouble) - truth[i].tensor).abs();
        EXPECT_LE(difference.mean().item<double>(), 1e-6) << file << " " << truth[i].name;
      }
    }
  }
};

class TrainerLayoutsOnDevices : public TrainerLayoutOnDevicesTest,
                                public ::testing::WithParamInterface<LayoutOnDevices> {};

TEST_P(TrainerLayoutsOnDevices, TrainAsOnTheCpu) {
  const LayoutOnDevices& layout = GetParam();
  ASSERT_EQ(run(config_of(layout, "cpu"), layout.num_processes).failures, "");
  late::set_delays({.longest = std::chrono::microseconds(20), .seed = 3});
  const DeviceEngine engine =
      layout.num_processes == 2 ? DeviceEngine::kStaged : DeviceEngine::kEnqueues;
  const Run found = run_on_devices(config_of(layout, "device"), layout.num_processes, 0, engine);
  ASSERT_EQ(found.failures, "");
  EXPECT_THAT(found.screen, HasSubstr("a sample:\n"));
  expect_numbers("device", "cpu", 2e-5);
  expect_weights("device", "cpu", 3);
  for (int rank = 0; rank < layout.num_processes; ++rank) {
    EXPECT_GT(late::counts(rank).kernels, 100U);
  }
}

INSTANTIATE_TEST_SUITE_P(Equality, TrainerLayoutsOnDevices,
                         ::testing::ValuesIn(layouts_on_devices()),
                         ::testing::PrintToStringParamName());

// Each part goes on from the snapshot of the part before, on another device with another layout and
// another number of ranks. The truth is one process on the CPU that is not interrupted.
TEST_F(TrainerLayoutOnDevicesTest, ASnapshotResumesOnAnotherDeviceWithAnotherLayout) {
  const LayoutOnDevices alone{"alone", 1, {.strategy = "single"}, "adamw"};
  const auto config_until = [&](const LayoutOnDevices& layout, int64_t step) {
    Config config = config_of({.parallel = layout.parallel, .optimizer = "adamw"}, "chain");
    config.run.resume = "auto";
    config.run.steps = step;
    return config;
  };
  Config whole = config_of(alone, "whole");
  whole.run.steps = 12;
  ASSERT_EQ(run(whole).failures, "");
  int64_t step = 0;
  for (const auto& [layout, is_on_device] : std::vector<std::pair<LayoutOnDevices, bool>>{
           {{"fsdp", 3, {.strategy = "fsdp"}}, true},
           {{"tensor", 2, {.strategy = "single", .tensor = 2}}, false},
           {{"zero2", 2, {.strategy = "zero2"}}, true},
           {{"pipeline", 2, {.pipeline = 2}}, true},
           {alone, false},
           {{"ddp_tensor", 4, {.tensor = 2}}, true}}) {
    SCOPED_TRACE(layout.name);
    step += 2;
    const Config config = config_until(layout, step);
    const Run part = is_on_device ? run_on_devices(config, layout.num_processes)
                                  : run(config, layout.num_processes);
    ASSERT_EQ(part.failures, "");
    ASSERT_EQ(part.result.steps, step);
  }
  const std::vector<double> found = numbers("chain", "loss");
  const std::vector<double> expected = numbers("whole", "loss");
  ASSERT_EQ(found.size(), 12U);
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 2e-5) << i;
  expect_weights("chain", "whole", 12);
}

// Autocast rounds on the device as on the CPU, also where a checkpoint computes a block again.
TEST_F(TrainerLayoutOnDevicesTest, AutocastTrainsAsOnTheCpu) {
  for (const std::string strategy : {"single", "ddp", "fsdp"}) {
    SCOPED_TRACE(strategy);
    LayoutOnDevices layout{.parallel = {.strategy = strategy}, .recomputed = "blocks"};
    const int num_ranks = strategy == "single" ? 1 : 2;
    ASSERT_EQ(run_on_devices(config_of(layout, "float32"), num_ranks).failures, "");
    layout.autocast = "bfloat16";
    ASSERT_EQ(run(config_of(layout, "cpu"), num_ranks).failures, "");
    ASSERT_EQ(run_on_devices(config_of(layout, "device"), num_ranks).failures, "");
    expect_numbers("device", "cpu", 5e-3);
    EXPECT_NE(numbers("device", "loss"), numbers("float32", "loss"));
  }
}

// Weights that no rank has whole are read into the shards of the devices.
TEST_F(TrainerLayoutOnDevicesTest, InitialWeightsAreThoseOfTheCpu) {
  ASSERT_EQ(run(config_of({.parallel = {.strategy = "single"}}, "weights")).failures, "");
  for (const auto& [layout, name] :
       {std::pair(LayoutOnDevices{.parallel = {.strategy = "fsdp"}}, "fsdp"),
        std::pair(LayoutOnDevices{.parallel = {.pipeline = 2}}, "pipeline")}) {
    Config config = config_of(layout, std::string("cpu-") + name);
    config.model.weights = snapshot("weights", 3);
    ASSERT_EQ(run(config, 2).failures, "");
    config.run.name = std::string("device-") + name;
    ASSERT_EQ(run_on_devices(config, 2).failures, "");
    expect_numbers(config.run.name, std::string("cpu-") + name, 2e-5);
  }
}

}  // namespace
}  // namespace cadre::train
