// Trains a module under DistributedDataParallel on the late device, and compares its parameters
// with those of one process on the CPU. Delays of the kernels make a missing order of two streams a
// wrong number.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/tensor/hooks/gradient_norm.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"
#include "training_on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
namespace nn = torch::nn;
using testing::DeviceEngine;
using testing::failure_of;
using testing::require;
using torch::Tensor;

constexpr int kNumSteps = 4;
constexpr int64_t kNumRows = 12;

// A module with parameters in several buckets and a buffer.
struct Net : nn::Module {
  Net() {
    first = register_module("first", nn::Linear(5, 8));
    second = register_module("second", nn::Linear(8, 3));
    to(torch::kDouble);
    mean = register_buffer("mean", torch::zeros({5}, torch::kDouble));
    const torch::NoGradGuard no_grad;
    double start = 0;
    for (Tensor& parameter : parameters()) {
      parameter.copy_(torch::sin(torch::arange(parameter.numel(), torch::kDouble) + ++start)
                          .view_as(parameter));
    }
  }
  Tensor forward(const Tensor& x) {
    if (is_training()) {
      const torch::NoGradGuard no_grad;
      mean.mul_(0.5).add_(x.mean(0), 0.5);
    }
    return second(torch::tanh(first(x - mean)));
  }
  nn::Linear first{nullptr}, second{nullptr};
  Tensor mean;
};

// Returns the inputs of a step. All halves of the rows have the same mean, so the buffer of rank 0
// is that of one process.
Tensor inputs_of(int step) {
  const Tensor x = torch::cos(torch::arange(kNumRows * 5, torch::kDouble) * (step + 1));
  return x.view({kNumRows, 5});
}

Tensor loss_of(const Tensor& output) {
  return output.square().mean();
}

std::vector<Tensor> parameters_after(Net& net) {
  std::vector<Tensor> values;
  for (const Tensor& parameter : net.parameters()) values.push_back(parameter.detach().cpu());
  return values;
}

// Trains in one process on the CPU.
std::vector<Tensor> trained_alone() {
  Net net;
  net.eval();
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    loss_of(net.forward(inputs_of(step))).backward();
    optimizer.step();
  }
  return parameters_after(net);
}

class DdpOnDevicesTest : public testing::OnDevices {
 protected:
  using Model = DistributedDataParallel<Net>;

  static Model model_on(const ProcessGroup& group, const c10::Device& device,
                        GradientWeighting weighting) {
    const auto net = std::make_shared<Net>();
    net->eval();
    net->to(device);
    return Model(net, group,
                 {.weighting = weighting, .bucket_caps = {.first_bytes = 100, .bytes = 200}});
  }

  struct Training {
    const ProcessGroup& group;
    const c10::Device& device;
    bool accumulates = false;
    bool is_on_other_stream = false;  // than that on which the wrapper was constructed
  };
  // The shares of the ranks are uneven.
  static std::vector<Tensor> trained_on(const Training& training) {
    const auto& [group, device, accumulates, is_on_other_stream] = training;
    Model model = model_on(group, device, GradientWeighting::kSamples);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    std::optional<testing::OtherStream> other;
    if (is_on_other_stream) other.emplace(device);
    const bool is_last = group.rank() + 1 == group.world_size();
    const int64_t begin = group.rank() == 0 ? 0 : 2 + 4 * (group.rank() - 1);
    const int64_t end = is_last ? kNumRows : begin + (begin == 0 ? 2 : 4);
    for (int step = 0; step < kNumSteps; ++step) {
      optimizer.zero_grad();
      const Tensor x = inputs_of(step).slice(0, begin, end).to(device);
      if (accumulates) {
        const int64_t half = x.size(0) / 2;
        const auto size = static_cast<double>(x.size(0));
        const auto first = static_cast<double>(half);
        {
          const auto no_sync = model.no_sync({.losses_are_weighted = true});
          (loss_of(model(x.slice(0, 0, half))) * (first / size)).backward();
        }
        (loss_of(model(x.slice(0, half))) * ((size - first) / size)).backward();
      } else {
        loss_of(model(x)).backward();
      }
      optimizer.step();
    }
    return parameters_after(*model.module());
  }
  static void require_equal(const std::vector<Tensor>& found, const std::vector<Tensor>& expected) {
    for (size_t i = 0; i < found.size(); ++i) {
      require(torch::allclose(found[i], expected[i], 1e-11, 1e-13),
              format("parameter {} differs by {}", i,
                     (found[i] - expected[i]).abs().max().item<double>()));
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Devices, DdpOnDevicesTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kNccl,
                                           DeviceEngine::kStaged, DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

// In accumulating steps each rank adds the gradients of two parts of its rows.
TEST_P(DdpOnDevicesTest, TrainsAsOneProcessOnTheCpu) {
  const std::vector<Tensor> expected = trained_alone();
  for (const int delay_us : {0, 300}) {
    late::set_delays({.longest = std::chrono::microseconds(delay_us), .seed = 5});
    for (const int num_ranks : {1, 2, 3}) {
      for (const bool accumulates : {false, true}) {
        SCOPED_TRACE(format("{} ranks, {} us, accumulating: {}", num_ranks, delay_us, accumulates));
        expect_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
          require_equal(trained_on({group, device, accumulates}), expected);
        });
      }
    }
  }
}

// Autograd accumulates the gradients on the stream on which the wrapper was constructed.
TEST_P(DdpOnDevicesTest, ATrainingOnAnotherStreamIsThatOfOneProcess) {
  const std::vector<Tensor> expected = trained_alone();
  for (const uint64_t seed : {1, 2, 3, 4}) {
    late::set_delays({.longest = std::chrono::microseconds(300), .seed = seed});
    for (const bool accumulates : {false, true}) {
      SCOPED_TRACE(format("seed {}, accumulating: {}", seed, accumulates));
      expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
        require_equal(trained_on({group, device, accumulates, true}), expected);
      });
    }
  }
}

// Rank 0's buffers are sent before each forward, and all ranks see the rows of rank 0 in them.
TEST_P(DdpOnDevicesTest, BuffersAreThoseOfRankZero) {
  Net alone;
  for (int step = 0; step < 3; ++step) alone.forward(inputs_of(step).slice(0, 0, 6));
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    Model model = model_on(group, device, GradientWeighting::kSamples);
    model->train();
    for (int step = 0; step < 3; ++step) {
      const Tensor x = inputs_of(step).chunk(2)[static_cast<size_t>(group.rank())].to(device);
      loss_of(model(x)).backward();
      model.zero_grad();
    }
    model(inputs_of(0).to(device));  // sends the buffers once more
    Net& net = *model.module();
    const Tensor after = alone.mean * 0.5 + inputs_of(0).mean(0) * 0.5;
    require(torch::allclose(net.mean.cpu(), after, 1e-12, 1e-14), "the running mean");
  });
}

TEST_P(DdpOnDevicesTest, GradientsAreClippedAsOnTheCpu) {
  Net alone;
  alone.eval();
  loss_of(alone.forward(inputs_of(1))).backward();
  const double expected = clip_grad_norm_(alone.parameters(), 0.01);
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    Model model = model_on(group, device, GradientWeighting::kSamples);
    loss_of(model(inputs_of(1).chunk(2)[static_cast<size_t>(group.rank())].to(device))).backward();
    const uint64_t waits = late::counts(group.rank()).num_synchronous();
    const double norm = clip_grad_norm_(model->parameters(), 0.01);
    require(late::counts(group.rank()).num_synchronous() == waits + 1, "one wait for the device");
    require(std::abs(norm - expected) < 1e-12, format("{} instead of {}", norm, expected));
    require(torch::allclose(model->first->weight.grad().cpu(), alone.first->weight.grad(), 1e-10,
                            1e-14),
            "the clipped gradient");
  });
}

class EnqueuedDdpTest : public DdpOnDevicesTest {};
INSTANTIATE_TEST_SUITE_P(Devices, EnqueuedDdpTest,
                         ::testing::Values(DeviceEngine::kEnqueues, DeviceEngine::kNccl),
                         [](const auto& test) { return testing::name_of(test.param); });

// A norm and a search for values that are not finite wait once each, and nothing else waits. The
// shares of the ranks are uneven.
TEST_P(EnqueuedDdpTest, AStepWaitsForTheDeviceForItsNormsOnly) {
  const testing::TrainingProgram plain{"plain"};
  const testing::TrainingProgram accumulating{.name = "accumulating", .accumulates = true};
  const testing::TrainingProgram clipped{.name = "clipped", .max_norm = 0.05};
  const testing::TrainingProgram scaled{.name = "scaled", .overflows = true};
  const testing::TrainingProgram both{.name = "both", .max_norm = 0.05, .overflows = true};
  for (const auto& program : {plain, accumulating, clipped, scaled, both}) {
    const testing::Values expected = testing::trained_alone(program);
    expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
      const auto net = testing::net_on(device);
      DistributedDataParallel<testing::UnitNet> model(
          net, group, {.bucket_caps = {.first_bytes = 300, .bytes = 700}});
      std::vector<Tensor> distinct;  // a tied weight is updated once
      for (const NamedTensor& named : distinct_parameters(*net)) distinct.push_back(named.tensor);
      AdamW optimizer(distinct, testing::adamw());
      const std::string waits = testing::train_on_rows(program, model, optimizer, group, device);
      require(waits.empty(), waits);
      testing::require_close(testing::values_of(*net), expected, 1e-9, program.name);
    });
  }
}

TEST_P(EnqueuedDdpTest, AStepNeverWaitsForTheDevice) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    Model model = model_on(group, device, GradientWeighting::kSamples);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const Tensor x = inputs_of(0).chunk(2)[static_cast<size_t>(group.rank())].to(device);
    const int index = group.rank();
    late::Counts before;
    for (int step = 0; step < 6; ++step) {
      if (step == 3) before = late::counts(index);
      optimizer.zero_grad();
      loss_of(model(x)).backward();
      optimizer.step();
    }
    const std::string waits = testing::waits_since(before, index);
    require(waits.empty(), waits);
    require(late::counts(index).kernels > before.kernels, "the steps ran on the device");
  });
}

// A module that uses its layers in another order than that in which it has registered them, and has
// a parameter that it does not use.
struct LaterFirst : nn::Module {
  LaterFirst() {
    idle = register_parameter("idle", torch::zeros({7}));
    second = register_module("second", nn::Linear(8, 3));
    first = register_module("first", nn::Linear(5, 8));
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    double start = 0;
    for (Tensor& parameter : parameters()) {
      parameter.copy_(torch::sin(torch::arange(parameter.numel(), torch::kDouble) + ++start)
                          .view_as(parameter));
    }
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }
  nn::Linear first{nullptr}, second{nullptr};
  Tensor idle;
};

// The first backward learns the order of the gradients, and moves them into other buckets. The
// memory of the first buckets is of the stream of the construction.
TEST_P(EnqueuedDdpTest, BucketsAreFreedBehindTheCopyIntoThoseOfTheLearnedOrder) {
  LaterFirst alone;
  loss_of(alone.forward(inputs_of(0))).backward();
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto net = std::make_shared<LaterFirst>();
    net->to(device);
    DistributedDataParallel<LaterFirst> model(net, group,
                                              {.bucket_caps = {.first_bytes = 100, .bytes = 200}});
    // A gradient of no backward, in memory of the stream of the construction, keeps its values.
    net->idle.mutable_grad() = torch::full({7}, 3, at::device(device).dtype(torch::kDouble));
    const testing::OtherStream other(device);
    const Tensor x = inputs_of(0).chunk(2)[static_cast<size_t>(group.rank())].to(device);
    loss_of(model(testing::with_late_end_of_backward(x))).backward();
    const auto truth = alone.parameters();
    for (size_t i = 0; i < truth.size(); ++i) {
      if (!truth[i].grad().defined()) continue;
      require(torch::allclose(net->parameters()[i].grad().cpu(), truth[i].grad(), 1e-11, 1e-13),
              format("gradient {}", i));
    }
    require(torch::all(net->idle.grad().cpu() == 3).item<bool>(), "the gradient of no backward");
    require(model.learned_layout().has_value(), "the learned order");
  });
}

TEST_P(DdpOnDevicesTest, ModulesOnOtherDevicesAreRefusedOnAllRanks) {
  expect_on_all(2, [](const ProcessGroup& group, const c10::Device& device) {
    const auto expect_refusal = [&](const std::function<void(Net & net)>& move,
                                    const std::string& text) {
      const auto net = std::make_shared<Net>();
      move(*net);
      const std::string failure = failure_of([&] { Model(net, group); });
      testing::require_refusal(failure, text);
    };
    expect_refusal([&](Net& net) { net.first->to(device); }, "\"second.weight\" on cpu");
    // The others do not wait for a rank that refuses alone.
    const c10::Device elsewhere = late::device(6);
    expect_refusal([&](Net& net) { net.to(group.rank() == 1 ? elsewhere : device); },
                   "is on " + elsewhere.str());
    expect_refusal(
        [&](Net& net) {
          net.to(device);
          if (group.rank() == 1) net.mean.set_data(net.mean.to(elsewhere));
        },
        "is on " + elsewhere.str());
    expect_refusal([&](Net& net) { net.to(group.rank() == 1 ? c10::Device(at::kCPU) : device); },
                   "first.weight");
  });
}

}  // namespace
}  // namespace cadre
