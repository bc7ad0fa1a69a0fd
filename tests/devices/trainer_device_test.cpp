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
#include "cadre/train/trainer/planning/config_plan.h"
#include "cadre/train/trainer/planning/plan_report.h"
#include "cadre/train/trainer/verify/verify_config.h"
#include "trainer_on_devices.h"

namespace cadre::train {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class TrainerOnDevicesTest : public TrainerOnDevices {
 protected:
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
  for (const std::string strategy : {"ddp", "zero1", "zero2", "fsdp"}) {
    SCOPED_TRACE(strategy);
    Config config = this->config(strategy);
    config.parallel.strategy = strategy;
    config.run.accumulate = 2;
    ASSERT_EQ(run_on_devices(config, 2, 0, DeviceEngine::kEnqueues).failures, "");
    for (const size_t rank : {0U, 1U}) {
      EXPECT_EQ(counted_[rank].num_steps, 10U);
      EXPECT_EQ(counted_[rank].num_synchronous, 10U) << counted_[rank].waits;
    }
  }
}

// The table at the start is the plan of the memory of the devices.
TEST_F(TrainerOnDevicesTest, ThePlanOfARunIsThatOfItsDevice) {
  Config config = this->config("device");
  config.model.width = 128;
  config.parallel.strategy = "fsdp";
  config.run.steps = 1;
  config.schedule.warmup_steps = 0;
  const Run found = run_on_devices(config, 2);
  ASSERT_EQ(found.failures, "");
  const auto table_of = [&](bool on_devices) {
    return start_table(plan_of_config(config, sizes_of_model(config),
                                      {.count = 2, .per_host = 2, .on_devices = on_devices}));
  };
  EXPECT_THAT(found.screen, HasSubstr(table_of(true)));
  EXPECT_THAT(found.screen, Not(HasSubstr(table_of(false))));
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
            config,
            {.num_steps = 3,
             .strategies = {"ddp", "ddp/accumulate", "zero1", "zero2/accumulate", "fsdp"}},
            {.world = group,
             .system = *system,
             .print = [&](std::string_view text) { screen += text; },
             .device = device});
        if (context.rank == 0) report = own;
        group.close();
      });
  EXPECT_TRUE(ranks.ok()) << ranks.failures();
  ASSERT_GE(report.strategies.size(), 5U) << screen;
  for (const StrategyReport& strategy : report.strategies) {
    SCOPED_TRACE(strategy.strategy);
    if (strategy.strategy.find("mapped") == std::string::npos) {
      EXPECT_TRUE(strategy.is_within()) << screen;
    } else {
      EXPECT_THAT(strategy.not_run, HasSubstr("parallel.form: the value"));
    }
  }
  // The reference and the ranks have computed on the devices.
  for (const int index : {0, 1}) EXPECT_GT(late::counts(index).kernels, 100U);
}

TEST_F(TrainerOnDevicesTest, WhatWorksOnTheCpuOnlyIsRefusedByItsKey) {
  const auto refusal_of = [&](const auto& change) {
    Config config = this->config("refused");
    config.parallel.strategy = "fsdp";
    change(config);
    return run_on_devices(config, 2).failures;
  };
  EXPECT_THAT(refusal_of([&](Config& config) { config.parallel.offload = folder_; }),
              HasSubstr("parallel.offload: the value in this configuration works on the CPU only, "
                        "and the run uses late:0: set none, or run.device=cpu"));
  EXPECT_THAT(refusal_of([](Config& config) { config.parallel.form = "mapped"; }),
              HasSubstr("parallel.form: the value in this configuration works on the CPU only, "
                        "and the run uses late:0: set auto, or run.device=cpu"));
}

}  // namespace
}  // namespace cadre::train
