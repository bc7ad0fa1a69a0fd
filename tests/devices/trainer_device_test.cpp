// Runs the trainer on the late device, alone and under ddp. The truth is the same configuration on
// the CPU, in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "cadre/train/trainer/verify/verify_config.h"
#include "on_devices.h"

namespace cadre::train {
namespace {

namespace late = testing::late;
using testing::DeviceEngine;
using ::testing::HasSubstr;

// What a rank counts from its second step on.
struct CountedSteps {
  uint64_t num_steps = 0;
  uint64_t num_synchronous = 0;
};

class TrainerOnDevicesTest : public TrainerTest {
 protected:
  static void SetUpTestSuite() { late::register_device(); }
  void SetUp() override { late::set_delays({}); }
  void TearDown() override {
    late::synchronize_all();
    late::set_delays({});
  }

  // Runs the configuration with a device for each rank. Rank r has the device r + first.
  Run run_on_devices(const Config& config, int world_size, int first = 0,
                     DeviceEngine engine = DeviceEngine::kStaged) {
    Run run;
    const auto peers = std::make_shared<testing::RanksInProcess>();
    const testing::RanksResult ranks =
        testing::run_ranks_as_threads(world_size, [&](testing::RankContext& context) {
          at::set_num_threads(1);
          CommunicatorOptions options{.timeout = testing::kRankTimeout};
          const c10::Device device = late::device(context.rank + first);
          options.device_backend = device_backend_of(engine, context.rank + first, peers);
          const ProcessGroup group(connect_ranks(context, options));
          testing::late_runtime().make_current(device);
          at::Generator generator = at::globalContext().defaultGenerator(device);
          generator.set_current_seed(static_cast<uint64_t>(context.rank));
          train(config, group, device, run);
          group.close();
        });
    run.failures = ranks.failures();
    return run;
  }

  void train(const Config& config, const ProcessGroup& group, const c10::Device& device, Run& run) {
    const auto system = os::make_native_system();
    CountedSteps& counted = counted_[static_cast<size_t>(group.rank())];
    counted = {};
    uint64_t before = 0;
    Trainer trainer(
        config, {.world = group,
                 .system = *system,
                 .time_in_communication = [&] { return group.communicator().time_in_operations(); },
                 // Is called once in each step, when the host has waited for the gradients' norm.
                 .stop_is_requested =
                     [&] {
                       const uint64_t now = late::counts(device.index()).num_synchronous();
                       if (before > 0) counted.num_synchronous += now - before;
                       if (before > 0) ++counted.num_steps;
                       before = now;
                       return false;
                     },
                 .print = [&](std::string_view text) { run.screen += text; },
                 .device = device});
    const TrainResult result = trainer.run();
    if (group.rank() == 0) run.result = result;
  }

  Config image_config(const std::string& name) const {
    Config config = this->config(name);
    config.model = {.kind = "cnn", .dropout = false};
    config.data.kind = "synthetic";
    config.data.samples = 60;
    config.data.held_out = 0.2;
    config.optimizer = default_optimizer("sgd");
    config.run.steps = 3;
    return config;
  }

  // The gradient of the key's bias is 0 but for rounding, and Adagrad and RMSprop divide by its
  // magnitude. So the tensor that contains it is left out if `ignored` is its name.
  void expect_same_values(const std::string& run_a, const std::string& run_b, int64_t step,
                          std::string_view ignored = "") const {
    for (const std::string file : {"model.safetensors", "optimizer.safetensors"}) {
      const std::vector<NamedTensor> a = tensors(run_a, step, file);
      const std::vector<NamedTensor> b = tensors(run_b, step, file);
      ASSERT_EQ(a.size(), b.size()) << file;
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_EQ(a[i].name, b[i].name);
        if (!ignored.empty() && a[i].name.find(ignored) != std::string::npos) continue;
        EXPECT_TRUE(torch::allclose(a[i].tensor, b[i].tensor, 1e-4, 1e-5))
            << file << " " << a[i].name;
      }
    }
  }

  std::array<CountedSteps, late::kNumDevices> counted_;
};

TEST_F(TrainerOnDevicesTest, TrainsAsOnTheCpu) {
  for (const std::string optimizer : {"adamw", "sgd", "adam", "adagrad", "rmsprop"}) {
    SCOPED_TRACE(optimizer);
    Config config = this->config("cpu-" + optimizer);
    config.optimizer = default_optimizer(optimizer);
    config.run.evaluate_every = 5;
    config.run.snapshot_every = 6;
    config.run.accumulate = 2;
    ASSERT_EQ(run(config).failures, "");
    for (const int num_ranks : {1, 2, 3}) {
      if (num_ranks > 1 && optimizer != "adamw") continue;
      SCOPED_TRACE(num_ranks);
      late::set_delays({.longest = std::chrono::microseconds(num_ranks == 2 ? 100 : 0), .seed = 6});
      Config on_device = config;
      on_device.run.name = cadre::format("device-{}-{}", optimizer, num_ranks);
      const Run found =
          run_on_devices(on_device, num_ranks, 0,
                         num_ranks == 2 ? DeviceEngine::kEnqueues : DeviceEngine::kStaged);
      ASSERT_EQ(found.failures, "");
      EXPECT_THAT(found.screen, HasSubstr("MB in tensors, at most"));
      expect_near(losses(on_device.run.name), losses(config.run.name));
      const bool divides = optimizer == "adagrad" || optimizer == "rmsprop";
      expect_same_values(config.run.name, on_device.run.name, 12, divides ? "attn_c_attn" : "");
      EXPECT_NEAR(found.result.held_out.loss, metrics(config.run.name).back()["held_out_loss"],
                  1e-5);
    }
  }
}

TEST_F(TrainerOnDevicesTest, ImagesTrainAsOnTheCpu) {
  const Config config = image_config("cpu");
  ASSERT_EQ(run(config).failures, "");
  Config on_device = config;
  on_device.run.name = "device";
  const Run found = run_on_devices(on_device, 2);
  ASSERT_EQ(found.failures, "");
  expect_near(losses("device"), losses("cpu"));
  expect_same_values("cpu", "device", 3);
  EXPECT_EQ(metrics("device").back()["accuracy"], metrics("cpu").back()["accuracy"]);
}

// The text is drawn on the CPU from the logits, so equal weights give the same text.
TEST_F(TrainerOnDevicesTest, TheSampleOfTheSameWeightsIsThatOfTheCpu) {
  Config config = this->config("first");
  config.sample = {.tokens = 40, .temperature = 0.5};
  ASSERT_EQ(run(config).failures, "");
  const auto sample_of = [](const std::string& screen) {
    const size_t begin = screen.find("a sample:");
    return screen.substr(begin, screen.find("\nmemory of", begin) - begin);
  };
  config.model.weights = snapshot("first", 12) + "/model.safetensors";
  config.optimizer.learning_rate = 1e-12;
  config.run.steps = 1;
  config.schedule.warmup_steps = 0;
  config.run.name = "cpu";
  const Run on_cpu = run(config);
  config.run.name = "device";
  const Run on_device = run_on_devices(config, 2);
  ASSERT_EQ(on_cpu.failures + on_device.failures, "");
  const std::string expected = sample_of(on_cpu.screen);
  EXPECT_GT(expected.size(), 30U);
  EXPECT_EQ(sample_of(on_device.screen).substr(0, 50), expected.substr(0, 50));
}

// In a step the host waits for the device once.
TEST_F(TrainerOnDevicesTest, AStepWaitsForTheDeviceOnce) {
  Config config = this->config("run");
  config.run.accumulate = 2;
  ASSERT_EQ(run_on_devices(config, 2, 0, DeviceEngine::kEnqueues).failures, "");
  for (const size_t rank : {0U, 1U}) {
    EXPECT_EQ(counted_[rank].num_steps, 11U);
    EXPECT_EQ(counted_[rank].num_synchronous, 11U);
  }
}

// A run goes on where it was, on any kind of device.
TEST_F(TrainerOnDevicesTest, ARunIsResumedOnAnotherDevice) {
  Config config = this->config("alone");
  config.run.steps = 9;
  ASSERT_EQ(run(config).failures, "");
  config.run.name = "moved";
  config.run.resume = "auto";
  config.run.steps = 3;
  config.schedule.warmup_steps = 2;
  // The schedule of the learning rate depends on the number of steps, so all runs have a constant
  // one.
  config.schedule.kind = "constant";
  Config constant = config;
  constant.run.name = "constant";
  constant.run.steps = 9;
  ASSERT_EQ(run(constant).failures, "");
  const Run first = run_on_devices(config, 2);
  ASSERT_EQ(first.failures, "");
  config.run.steps = 6;
  const Run second = run(config, 2);
  ASSERT_EQ(second.failures, "");
  config.run.steps = 9;
  const Run third = run_on_devices(config, 1, /*first=*/3);
  ASSERT_EQ(third.failures, "");
  EXPECT_THAT(third.screen,
              HasSubstr("written by a run on the CPU, so random numbers of late begin anew"));
  expect_near(losses("moved"), losses("constant"));
  expect_same_values("constant", "moved", 9);
}

// Dropout of the cnn draws from the generator of the device. A resumed run draws what the run would
// have drawn.
TEST_F(TrainerOnDevicesTest, TheGeneratorOfTheDeviceIsInTheSnapshot) {
  Config config = image_config("whole");
  config.model.dropout = true;
  config.run.steps = 4;
  config.schedule.kind = "constant";
  config.schedule.warmup_steps = 0;
  ASSERT_EQ(run_on_devices(config, 2).failures, "");
  config.run.name = "resumed";
  config.run.steps = 2;
  ASSERT_EQ(run_on_devices(config, 2).failures, "");
  config.run.steps = 4;
  config.run.resume = "auto";
  const Run resumed = run_on_devices(config, 2);
  ASSERT_EQ(resumed.failures, "");
  EXPECT_THAT(resumed.screen, ::testing::Not(HasSubstr("begin anew")));
  EXPECT_EQ(losses("resumed"), losses("whole"));
  expect_same_bits("resumed", "whole", 4);
}

TEST_F(TrainerOnDevicesTest, ALossThatIsNotFiniteEndsTheRunBeforeTheUpdate) {
  Config config = this->config("nan");
  config.optimizer.learning_rate = 1e30;
  config.optimizer.clip_norm = 0;
  const Run found = run_on_devices(config, 2);
  EXPECT_THAT(found.failures, HasSubstr("the loss is "));
  EXPECT_THAT(found.failures, HasSubstr("lower optimizer.learning_rate"));
}

// The reference is one process on the device.
TEST_F(TrainerOnDevicesTest, AConfigurationIsVerifiedOnADevice) {
  Config config = this->config("verified");
  config.optimizer = default_optimizer("sgd");
  std::string screen;
  VerifyReport report;
  const testing::RanksResult ranks =
      testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
        CommunicatorOptions options{.timeout = testing::kRankTimeout};
        options.device_backend = device_backend_of(DeviceEngine::kStaged, context.rank, nullptr);
        const ProcessGroup group(connect_ranks(context, options));
        const c10::Device device = late::device(context.rank);
        testing::late_runtime().make_current(device);
        const auto system = os::make_native_system();
        const VerifyReport own = verify_config(
            config, {.num_steps = 3, .strategies = {"ddp", "ddp/accumulate", "zero1"}},
            {.world = group,
             .system = *system,
             .print = [&](std::string_view text) { screen += text; },
             .device = device});
        if (context.rank == 0) report = own;
        group.close();
      });
  EXPECT_TRUE(ranks.ok()) << ranks.failures();
  ASSERT_GE(report.strategies.size(), 3U) << screen;
  for (const StrategyReport& strategy : report.strategies) {
    SCOPED_TRACE(strategy.strategy);
    if (strategy.strategy == "ddp" || strategy.strategy == "ddp/accumulate") {
      EXPECT_TRUE(strategy.is_within()) << screen;
    } else {
      EXPECT_THAT(strategy.not_run, HasSubstr("works on the CPU only"));
    }
  }
  // The reference and the ranks have computed on the devices.
  for (const int index : {0, 1}) EXPECT_GT(late::counts(index).kernels, 100U);
}

TEST_F(TrainerOnDevicesTest, WhatWorksOnTheCpuOnlyIsRefusedByItsKey) {
  const auto refusal_of = [&](const auto& change) {
    Config config = this->config("refused");
    change(config);
    return run_on_devices(config, 2).failures;
  };
  EXPECT_THAT(refusal_of([](Config& config) { config.parallel.strategy = "fsdp"; }),
              HasSubstr("parallel.strategy: the value in this configuration works on the CPU only, "
                        "and the run uses late:0: set ddp, or run.device=cpu"));
  EXPECT_THAT(refusal_of([](Config& config) { config.parallel.tensor = 2; }),
              HasSubstr("parallel.tensor, .pipeline"));
  EXPECT_THAT(refusal_of([](Config& config) { config.model.dropout_rate = 0.1; }),
              HasSubstr("model.dropout_rate"));
  EXPECT_THAT(refusal_of([](Config& config) { config.run.autocast = "bfloat16"; }),
              HasSubstr("run.autocast"));
  EXPECT_THAT(refusal_of([](Config& config) { config.optimizer = default_optimizer("adadelta"); }),
              HasSubstr("optimizer.kind"));
  EXPECT_THAT(refusal_of([](Config& config) { config.model.checkpoint_activations = "blocks"; }),
              HasSubstr("model.checkpoint_activations"));
}

}  // namespace
}  // namespace cadre::train
