// A fixture that runs the trainer on the late device, with threads as ranks and a device for each
// rank.
//
// Threads: one for each rank. Blocking: until all ranks have ended. For tests only.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/trainer_runs.h"
#include "on_devices.h"
#include "training_on_devices.h"

namespace cadre::train {

namespace late = testing::late;
using testing::DeviceEngine;

// What a rank counts from its third step on: the first ones learn and compare more than others.
struct CountedSteps {
  uint64_t num_steps = 0;
  uint64_t num_synchronous = 0;
  std::string waits;  // of the last step, for errors
};

class TrainerOnDevices : public TrainerTest {
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
    late::Counts before;
    int num_steps = 0;
    Trainer trainer(
        config, {.world = group,
                 .system = *system,
                 .time_in_communication = [&] { return group.communicator().time_in_operations(); },
                 // Is called once in each step, when the host has waited for the gradients' norm.
                 .stop_is_requested =
                     [&] {
                       const late::Counts now = late::counts(device.index());
                       if (++num_steps > 2) {
                         ++counted.num_steps;
                         counted.num_synchronous +=
                             now.num_synchronous() - before.num_synchronous();
                         counted.waits = testing::waits_since(before, device.index());
                       }
                       before = now;
                       return false;
                     },
                 .print = [&](std::string_view text) { run.screen += text; },
                 .device = device});
    const TrainResult result = trainer.run();
    if (group.rank() == 0) run.result = result;
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

}  // namespace cadre::train
