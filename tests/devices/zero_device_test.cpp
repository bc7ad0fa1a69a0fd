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
using testing::DeviceEngine;
using testing::failure_of;
using testing::inputs_of;
using testing::kNumSteps;
using testing::loss_of;
using testing::require;
using testing::UnitNet;
using testing::Values;
using torch::Tensor;
using Model = DistributedDataParallel<UnitNet>;
using Optimizer = ZeroRedundancyOptimizer<AdamW>;

struct Program {
  std::string name;
  GradientPlacement placement = GradientPlacement::kReplicated;
  bool has_frozen = false;
  bool accumulates = false;
  std::optional<double> max_norm = {};
};

std::vector<Program> programs() {
  constexpr auto kSharded = GradientPlacement::kSharded;
  return {{.name = "stage 1"},
          {.name = "stage 2", .placement = kSharded},
          {.name = "stage 1, frozen", .has_frozen = true},
          {.name = "stage 2, frozen", .placement = kSharded, .has_frozen = true},
          {.name = "stage 1, accumulating", .accumulates = true},
          {.name = "stage 2, accumulating", .placement = kSharded, .accumulates = true},
          {.name = "stage 1, clipped", .max_norm = 0.05},
          {.name = "stage 2, clipped", .placement = kSharded, .max_norm = 0.05}};
}

torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.05).weight_decay(0.1);
}

Values trained_alone(const Program& program) {
  UnitNet net;
  if (program.has_frozen) net.freeze_some();
  std::vector<Tensor> distinct;  // a tied weight is updated once
  for (const NamedTensor& named : distinct_parameters(net)) distinct.push_back(named.tensor);
  AdamW optimizer(distinct, adamw());
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    loss_of(net.forward(inputs_of(step))).backward();
    if (program.max_norm) clip_grad_norm_(distinct, *program.max_norm);
    optimizer.step();
  }
  return testing::values_of(net);
}

std::shared_ptr<UnitNet> net_on(const c10::Device& device, bool has_frozen = false) {
  const auto net = std::make_shared<UnitNet>();
  if (has_frozen) net->freeze_some();
  net->to(device);
  return net;
}

DistributedDataParallelOptions options_of(const Program& program) {
  return {.bucket_caps = {.first_bytes = 300, .bytes = 700}, .gradients = program.placement};
}

// The stream on which the wrappers are constructed, and that of the training.
enum class Streams { kOne, kTwo };

Values trained(const Program& program, const ProcessGroup& group, const c10::Device& device,
               Streams streams = Streams::kOne) {
  const auto net = net_on(device, program.has_frozen);
  Model model(net, group, options_of(program));
  Optimizer optimizer(model, adamw(), {.bucket_cap_bytes = 500});
  std::optional<testing::OtherStream> other;
  if (streams == Streams::kTwo) other.emplace(device);
  const testing::Rows rows = testing::rows_of(group.rank(), group.world_size());
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const Tensor x = inputs_of(step).slice(0, rows.begin, rows.end).to(device);
    const auto size = static_cast<double>(x.size(0));
    if (program.accumulates) {
      {
        const auto no_sync = model.no_sync({.losses_are_weighted = true});
        (loss_of(model(x.slice(0, 0, 1))) / size).backward();
      }
      (loss_of(model(x.slice(0, 1))) * ((size - 1) / size)).backward();
    } else {
      loss_of(model(x)).backward();
    }
    if (program.max_norm) clip_grad_norm_(model, *program.max_norm);
    optimizer.step();
  }
  optimizer.wait();
  return testing::values_of(*net);
}

class ZeroOnDevicesTest : public testing::OnDevices {};

INSTANTIATE_TEST_SUITE_P(Devices, ZeroOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kStaged,
                                           DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(ZeroOnDevicesTest, TrainsAsOneProcessOnTheCpu) {
  for (const Program& program : programs()) {
    const Values expected = trained_alone(program);
    for (const int num_ranks : {1, 2, 3}) {
      if (num_ranks == 3 && GetParam() == DeviceEngine::kStagedInPieces) continue;  // slow
      expect_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
        testing::require_close(trained(program, group, device), expected, 1e-9,
                               format("{}, {} ranks", program.name, num_ranks));
      });
    }
  }
}

TEST_P(ZeroOnDevicesTest, DelaysOfKernelsChangeNothing) {
  for (const Program& program :
       {Program{.name = "stage 1"},
        Program{.name = "stage 2", .placement = GradientPlacement::kSharded}}) {
    const Values expected = trained_alone(program);
    // The engine in pieces, which takes ten times as long, orders streams as the staged one.
    const uint64_t num_seeds = GetParam() == DeviceEngine::kStagedInPieces ? 2 : 10;
    for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
      late::set_delays({.longest = std::chrono::microseconds(300), .seed = seed});
      expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
        testing::require_close(trained(program, group, device), expected, 1e-9,
                               format("{}, seed {}", program.name, seed));
      });
    }
  }
}

// Autograd accumulates the gradients on the stream on which the wrapper was constructed.
TEST_P(ZeroOnDevicesTest, ATrainingOnAnotherStreamIsThatOfOneProcess) {
  for (const Program& program : programs()) {
    const Values expected = trained_alone(program);
    const uint64_t num_seeds = GetParam() == DeviceEngine::kEnqueues ? 4 : 1;
    for (uint64_t seed = 1; seed <= num_seeds; ++seed) {
      late::set_delays({.longest = std::chrono::microseconds(300), .seed = seed});
      expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
        testing::require_close(trained(program, group, device, Streams::kTwo), expected, 1e-9,
                               format("{}, seed {}", program.name, seed));
      });
    }
  }
}

// The state dict has whole tensors, which load into an optimizer on another number of ranks.
TEST_P(ZeroOnDevicesTest, StateMovesToAnotherNumberOfRanks) {
  const Program program{.name = "stage 1"};
  const Values expected = trained_alone(program);
  std::vector<ParameterState> saved;
  Values halfway;
  const auto run = [&](const ProcessGroup& group, const c10::Device& device, int begin, int end) {
    const auto net = net_on(device);
    if (begin > 0) {
      const torch::NoGradGuard no_grad;
      for (auto& item : net->named_parameters()) item.value().copy_(halfway.at(item.key()));
    }
    Model model(net, group, options_of(program));
    Optimizer optimizer(model, adamw(), {.bucket_cap_bytes = 500});
    if (begin > 0) optimizer.load_state_dict(saved);
    const testing::Rows rows = testing::rows_of(group.rank(), group.world_size());
    for (int step = begin; step < end; ++step) {
      optimizer.zero_grad();
      loss_of(model(inputs_of(step).slice(0, rows.begin, rows.end).to(device))).backward();
      optimizer.step();
    }
    std::vector<ParameterState> state = optimizer.state_dict();
    for (ParameterState& of : state) {
      for (NamedTensor& named : of.tensors) named.tensor = named.tensor.cpu();
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
      require(failure.find("kInvalidArgument") != std::string::npos &&
                  failure.find(text) != std::string::npos,
              failure);
    };
    expect_refusal(net_on(group.rank() == 1 ? late::device(6) : device), "is on late:6");
    const auto net = net_on(device);
    net->blocks[1]->to(at::kCPU);
    expect_refusal(net, "move the module to one device");
  });
}

class EnqueuedZeroTest : public ZeroOnDevicesTest {};
INSTANTIATE_TEST_SUITE_P(Devices, EnqueuedZeroTest, ::testing::Values(DeviceEngine::kEnqueues));

TEST_P(EnqueuedZeroTest, AStepNeverWaitsForTheDevice) {
  for (const Program& program : programs()) {
    if (program.max_norm) continue;
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const auto net = net_on(device, program.has_frozen);
      Model model(net, group, options_of(program));
      Optimizer optimizer(model, adamw(), {.bucket_cap_bytes = 500});
      const Tensor x = inputs_of(group.rank()).to(device);
      late::Counts before;
      for (int step = 0; step < 6; ++step) {
        if (step == 3) before = late::counts(group.rank());
        optimizer.zero_grad();
        if (program.accumulates) {
          const auto no_sync = model.no_sync();
          loss_of(model(x)).backward();
        }
        loss_of(model(x)).backward();
        optimizer.step();
      }
      const std::string waits = testing::waits_since(before, group.rank());
      require(waits.empty(), program.name + ": " + waits);
    });
  }
}

}  // namespace
}  // namespace cadre::zero_on_devices
