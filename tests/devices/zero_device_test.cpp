// Trains with ZeroRedundancyOptimizer on the late device, and compares the parameters with those of
// one process on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"
#include "training_on_devices.h"

namespace cadre::zero_on_devices {
namespace {

namespace late = testing::late;
using testing::adamw;
using testing::DeviceEngine;
using testing::failure_of;
using testing::inputs_of;
using testing::kNumSteps;
using testing::loss_of;
using testing::net_on;
using testing::require;
using testing::Streams;
using testing::UnitNet;
using testing::Values;
using torch::Tensor;
using Model = DistributedDataParallel<UnitNet>;
using Optimizer = ZeroRedundancyOptimizer<AdamW>;

struct Case {
  testing::TrainingProgram program;
  GradientPlacement placement = GradientPlacement::kReplicated;
};

// Each program in both stages.
std::vector<Case> cases_of(const std::vector<testing::TrainingProgram>& programs) {
  std::vector<Case> cases;
  for (const testing::TrainingProgram& program : programs) {
    for (const auto placement : {GradientPlacement::kReplicated, GradientPlacement::kSharded}) {
      cases.push_back({program, placement});
      cases.back().program.name +=
          placement == GradientPlacement::kSharded ? ", stage 2" : ", stage 1";
    }
  }
  return cases;
}

std::vector<Case> cases() {
  return cases_of({{"plain"},
                   {.name = "frozen", .has_frozen = true},
                   {.name = "accumulating", .accumulates = true},
                   {.name = "clipped", .max_norm = 0.05},
                   {.name = "scaled", .overflows = true},
                   {.name = "scaled and clipped", .max_norm = 0.05, .overflows = true}});
}

DistributedDataParallelOptions options_of(const Case& of) {
  return {.bucket_caps = {.first_bytes = 300, .bytes = 700}, .gradients = of.placement};
}

struct Trained {
  Values values;
  std::string waits;  // see train_on_rows()
};

Trained train(const Case& of, const ProcessGroup& group, const c10::Device& device,
              Streams streams = Streams::kOne) {
  const auto net = net_on(device, of.program.has_frozen);
  Model model(net, group, options_of(of));
  Optimizer optimizer(model, adamw(), {.bucket_cap_bytes = 500});
  std::optional<testing::OtherStream> other;
  if (streams == Streams::kTwo) other.emplace(device);
  const std::string waits = testing::train_on_rows(of.program, model, optimizer, group, device);
  optimizer.wait();
  return {.values = testing::values_of(*net), .waits = waits};
}

Values trained(const Case& of, const ProcessGroup& group, const c10::Device& device) {
  return train(of, group, device).values;
}

class ZeroOnDevicesTest : public testing::TrainingOnDevices {};

INSTANTIATE_TEST_SUITE_P(Devices, ZeroOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged,
                                           DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(ZeroOnDevicesTest, TrainsAsOneProcessOnTheCpu) {
  expect_in_worlds<Case>(cases(), trained);
}

TEST_P(ZeroOnDevicesTest, DelaysOfKernelsChangeNothing) {
  expect_with_delays<Case>(cases_of({{"plain"}}), 10, trained);
}

// Autograd accumulates the gradients on the stream on which the wrapper was constructed.
TEST_P(ZeroOnDevicesTest, ATrainingOnAnotherStreamIsThatOfOneProcess) {
  expect_with_delays<Case>(
      cases(), 4, [](const Case& of, const ProcessGroup& group, const c10::Device& device) {
        return train(of, group, device, Streams::kTwo).values;
      });
}

// The state dict has whole tensors, which load into an optimizer on another number of ranks.
TEST_P(ZeroOnDevicesTest, StateMovesToAnotherNumberOfRanks) {
  const Case of{{"moved"}};
  const Values expected = testing::trained_alone(of.program);
  std::vector<ParameterState> saved;
  Values halfway;
  const auto run = [&](const ProcessGroup& group, const c10::Device& device, int begin, int end) {
    const auto net = net_on(device);
    if (begin > 0) {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(halfway.at(item.key()));
    }
    Model model(net, group, options_of(of));
    Optimizer optimizer(model, adamw(), {.bucket_cap_bytes = 500});
    if (begin > 0) optimizer.load_state_dict(saved);
    const testing::Rows rows = testing::rows_of(group.rank(), group.world_size());
    for (int step = begin; step < end; ++step) {
      optimizer.zero_grad();
      loss_of(model(inputs_of(step).slice(0, rows.begin, rows.end).to(device))).backward();
      optimizer.step();
    }
    std::vector<ParameterState> state = optimizer.state_dict();
    for (ParameterState& saved_state : state) {
      for (NamedTensor& named : saved_state.tensors) named.tensor = named.tensor.cpu();
    }
    const Values values = testing::values_of(*net);
    if (group.rank() == 0 && begin == 0) {
      saved = state;
      halfway = values;
    }
    if (begin > 0) testing::require_close(values, expected, 1e-9, "after loading");
  };
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    run(group, device, 0, kNumSteps / 2);
  });
  expect_on_all(3, [&](const ProcessGroup& group, const c10::Device& device) {
    run(group, device, kNumSteps / 2, kNumSteps);
  });
}

TEST_P(ZeroOnDevicesTest, GradientsThatWereNotReducedAreRefused) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto net = net_on(device);
    Optimizer optimizer(net->named_parameters(), group, adamw());
    loss_of(net->forward(inputs_of(group.rank()).to(device))).backward();
    const std::string failure = failure_of([&] { optimizer.step(); });
    require(failure.find("must be reduced before step()") != std::string::npos, failure);
  });
}

TEST_P(ZeroOnDevicesTest, ParametersOnOtherDevicesAreRefused) {
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto expect_refusal = [&](const std::shared_ptr<UnitNet>& net, const std::string& text) {
      const std::string failure =
          failure_of([&] { Optimizer(net->named_parameters(), group, adamw()); });
      testing::require_refusal(failure, text);
    };
    expect_refusal(net_on(group.rank() == 1 ? late::device(6) : device), "is on late:6");
    const auto net = net_on(device);
    net->blocks[1]->to(at::kCPU);
    expect_refusal(net, "move the module to one device");
  });
}

class EnqueuedZeroTest : public ZeroOnDevicesTest {};
INSTANTIATE_TEST_SUITE_P(Devices, EnqueuedZeroTest, ::testing::Values(DeviceEngine::kEnqueues));

// A norm and a search for values that are not finite wait once each, and nothing else waits.
TEST_P(EnqueuedZeroTest, AStepWaitsForTheDeviceForItsNormsOnly) {
  for (const Case& of : cases()) {
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const std::string waits = train(of, group, device).waits;
      require(waits.empty(), waits);
    });
  }
}

}  // namespace
}  // namespace cadre::zero_on_devices
