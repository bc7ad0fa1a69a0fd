// Tests a rank that is killed or stopped inside each collective on memory of the late device: the
// survivors throw the same errors as on the CPU. A program of its own, because a process that is
// forked after a device has been registered has no streams.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "cadre/tensor/backends/staged_engine.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "tests/devices/run_on_device.h"
#include "tests/process/failure_cases.h"

namespace cadre::failures {
namespace {

namespace late = testing::late;

// Starts the threads of all streams, which end with the process.
void start_device(Rank rank) {
  late::register_device();
  const c10::Device device = late::device(rank.value);
  const device::DeviceRuntime runtime = *device::find_devices(device.type()).runtime;
  runtime.make_current(device);
  late::enqueue(runtime.current_stream(device), [] {});
  for (int i = 0; i < late::kNumStreams; ++i) {
    late::enqueue(runtime.pooled_stream(device, device::StreamPriority::kNormal), [] {});
    late::enqueue(runtime.pooled_stream(device, device::StreamPriority::kHigh), [] {});
  }
}

Memory memory_of_device() {
  return {.run_call = testing::run_on_device,
          .prepare = start_device,
          .device_backend = [](Rank rank) -> std::optional<DeviceBackend> {
            return DeviceBackend{.device = *device::to_core(late::device(rank.value)),
                                 .make = staged_engine()};
          }};
}

class DeviceFailureTest : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceFailureTest, EverySurvivorNamesTheCulpritAndTheGroupIsRebuilt) {
  expect_named_failure(GetParam(), memory_of_device());
}

std::vector<Case> cases_in(Place place) {
  static constexpr OpKind kKinds[] = {
      OpKind::kBroadcast, OpKind::kAllReduce,     OpKind::kReduce,
      OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kGather,
      OpKind::kScatter,   OpKind::kAllToAll,      OpKind::kAllToAllV};
  return cases_of(kKinds, place);
}

std::string name_of_test(const ::testing::TestParamInfo<Case>& info) {
  return name_of(info.param);
}

// CTest runs only the chosen share of these cases.
INSTANTIATE_TEST_SUITE_P(World, DeviceFailureTest,
                         ::testing::ValuesIn(testing::share_of(cases_in(Place::kWorld))),
                         name_of_test);
INSTANTIATE_TEST_SUITE_P(Subgroup, DeviceFailureTest,
                         ::testing::ValuesIn(testing::share_of(cases_in(Place::kSubgroup))),
                         name_of_test);

}  // namespace
}  // namespace cadre::failures
