// Tests failures of collectives on devices: the errors are those of the CPU, and no rank waits
// longer than its deadline.
#include <c10/core/StreamGuard.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
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
