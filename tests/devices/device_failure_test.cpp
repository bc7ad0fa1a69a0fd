// Tests failures of collectives on devices: the errors are those of the CPU, and no rank waits
// longer than its deadline.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "on_devices.h"

namespace cadre {
namespace {

namespace late = testing::late;
using std::chrono::milliseconds;
using ::testing::AllOf;
using testing::DeviceEngine;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;

class StagedFailureTest : public testing::OnDevices {};

INSTANTIATE_TEST_SUITE_P(Devices, StagedFailureTest,
                         ::testing::Values(DeviceEngine::kStaged, DeviceEngine::kStagedInPieces),
                         [](const auto& test) { return testing::name_of(test.param); });

TEST_P(StagedFailureTest, ACallWhoseTurnOnTheDeviceDoesNotComeTimesOut) {
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        const c10::Stream held = pooled(device);
        std::optional<late::StreamHold> hold;
        if (group.rank() == 0) hold.emplace(held);
        const c10::StreamGuard guard(held);
        const Tensor tensor = torch::full({100}, 1.0, at::device(device));
        group.all_reduce(tensor,
                         {.timeout = group.rank() == 0 ? milliseconds(20'000) : milliseconds(300)});
      });
  EXPECT_THAT(failures[1], AllOf(HasSubstr("kTimeout"), HasSubstr("waiting for rank 0"),
                                 HasSubstr("last seen in all_reduce #1, device")));
  EXPECT_THAT(failures[0], AllOf(HasSubstr("kAborted"), HasSubstr("first failure: all_reduce #1"),
                                 HasSubstr("ms on rank 1")));
}

TEST_P(StagedFailureTest, MemoryOfTheCpuOnOneRankIsAMismatchThatIsNamed) {
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        const c10::Device own = group.rank() == 0 ? c10::Device(at::kCPU) : device;
        group.all_reduce(torch::ones({4}, at::device(own)));
      });
  for (const std::string& failure : failures) {
    EXPECT_THAT(failure, AllOf(HasSubstr("kInvalidArgument"), HasSubstr("on the device")));
  }
}

// A module whose layers run in another order than that in which they are registered, so that DDP
// learns other buckets in the first backward.
struct Reordered : torch::nn::Module {
  Reordered() {
    second = register_module("second", torch::nn::Linear(40, 3));
    first = register_module("first", torch::nn::Linear(5, 40));
    const torch::NoGradGuard no_grad;
    double start = 0;
    for (Tensor& parameter : parameters()) {
      const auto angles = torch::arange(parameter.numel()) * 1.0;
      parameter.copy_(torch::sin(angles + ++start).view_as(parameter));
    }
  }
  Tensor forward(const Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

// Returns the parameters after three steps on the rows of this rank.
Tensor trained(const std::function<Tensor(const Tensor&)>& model,
               const std::vector<Tensor>& parameters, const Tensor& rows) {
  torch::optim::SGD optimizer(parameters, 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model(rows * (step + 1)).square().mean().backward();
    optimizer.step();
  }
  std::vector<Tensor> values;
  for (const Tensor& parameter : parameters) values.push_back(parameter.detach().cpu().flatten());
  return torch::cat(values);
}

// If one rank had other buckets than the others, their collectives would not match.
TEST_P(StagedFailureTest, ARankWithoutMemoryForLearnedBucketsKeepsTheOldOnesOnAllRanks) {
  const Tensor rows = torch::cos(torch::arange(4 * 5)).view({4, 5});
  Reordered alone;
  const Tensor expected =
      trained([&](const Tensor& x) { return alone.forward(x); }, alone.parameters(), rows);
  expect_on_all(2, [&](const ProcessGroup& group, const c10::Device& device) {
    const auto net = std::make_shared<Reordered>();
    net->to(device);
    DistributedDataParallel<Reordered> model(net, group);
    const auto num_bytes = static_cast<size_t>(expected.nbytes());
    if (group.rank() == 1) {
      late::fail_allocations(device.index(),
                             [num_bytes](size_t asked) { return asked >= num_bytes; });
    }
    auto* const memory = c10::getDeviceAllocator(device.type());
    const auto num_before = memory->getDeviceStats(device.index()).num_ooms;
    const Tensor own = rows.chunk(2)[static_cast<size_t>(group.rank())].to(device);
    const Tensor found =
        trained([&](const Tensor& x) { return model(x); }, model->parameters(), own);
    late::fail_allocations(device.index(), nullptr);
    const auto num_failed = memory->getDeviceStats(device.index()).num_ooms - num_before;
    require(num_failed == (group.rank() == 1 ? 1 : 0), format("{} allocations", num_failed));
    require(torch::allclose(found, expected, 1e-5, 1e-6), "the parameters of one process");
  });
}

TEST_P(StagedFailureTest, AbortEndsACallOnAllRanks) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<std::string> failures =
      failures_of(2, [](const ProcessGroup& group, const c10::Device& device) {
        if (group.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(100));
          group.communicator().abort("the test ends it");
        }
        group.all_reduce(torch::ones({100}, at::device(device)));
      });
  for (const std::string& failure : failures) EXPECT_THAT(failure, HasSubstr("the test ends it"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace cadre
