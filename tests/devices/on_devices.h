// Groups of ranks on the late device, for tests. Each rank is a thread with a device of its own,
// and a group with an engine for that device.
//
// Threads: one for each rank. Blocking: until all ranks have ended. Errors: an exception of a rank
// is a failure of the test.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/tensor/backends/device_engine.h"
#include "cadre/tensor/backends/staged_engine.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/late_engine.h"

namespace cadre::testing {

// The engine for memory of the device: one that only enqueues, that of NCCL with the fake NCCL, or
// the staged one, also with pieces of 32 bytes.
enum class DeviceEngine { kEnqueues, kNccl, kStaged, kStagedInPieces };

inline std::string name_of(DeviceEngine engine) {
  switch (engine) {
    case DeviceEngine::kEnqueues:
      return "Enqueues";
    case DeviceEngine::kNccl:
      return "Nccl";
    case DeviceEngine::kStaged:
      return "Staged";
    case DeviceEngine::kStagedInPieces:
      break;
  }
  return "StagedInPieces";
}

// Returns whether a Work of the engine orders streams and does not wait on the host.
inline bool is_stream_ordered(DeviceEngine engine) {
  return engine == DeviceEngine::kEnqueues || engine == DeviceEngine::kNccl;
}

inline NcclOptions fake_nccl_options() {
  return {.library = fake_nccl::load(), .device_type = DeviceType::kPrivateUse1};
}

inline DeviceBackend device_backend_of(DeviceEngine engine, int rank,
                                       const std::shared_ptr<RanksInProcess>& peers) {
  if (engine == DeviceEngine::kEnqueues) return late_engine(rank, peers);
  const Device device = *device::to_core(late::device(rank));
  if (engine == DeviceEngine::kNccl) {
    return {.device = device,
            .make = device_engine(DeviceEngineChoice::kNccl, fake_nccl_options())};
  }
  return {.device = device,
          .make = engine == DeviceEngine::kStaged ? staged_engine() : staged_engine(32)};
}

inline device::DeviceRuntime late_runtime() {
  return *device::find_devices(late::device().type()).runtime;
}

// Lets this thread enqueue on a stream of its own, behind the work of the stream that was current,
// as long as the object exists.
class OtherStream {
 public:
  explicit OtherStream(const c10::Device& device) : guard_(ordered(device)) {}

 private:
  static c10::Stream ordered(const c10::Device& device) {
    const c10::Stream other = late_runtime().pooled_stream(device, device::StreamPriority::kNormal);
    device::StreamPoint::on_current_stream(device).block(other);
    return other;
  }
  c10::StreamGuard guard_;
};

// A test on devices, in which kernels run without delay unless the test sets delays.
class OnDevices : public ::testing::TestWithParam<DeviceEngine> {
 protected:
  using Body = std::function<void(const ProcessGroup& group, const c10::Device& device)>;

  static void SetUpTestSuite() { late::register_device(); }
  void SetUp() override { late::set_delays({}); }
  void TearDown() override {
    late::synchronize_all();
    late::set_delays({});
  }

  static c10::Stream pooled(const c10::Device& device) {
    return late_runtime().pooled_stream(device, device::StreamPriority::kNormal);
  }

  // Runs `body` on all ranks, and returns what happened on each of them.
  RanksResult run_on_all(int num_ranks, const Body& body) {
    const auto peers = std::make_shared<RanksInProcess>();
    return run_ranks_as_threads(num_ranks, [&](RankContext& context) {
      at::set_num_threads(1);
      CommunicatorOptions options{.timeout = kRankTimeout};
      options.device_backend = device_backend_of(GetParam(), context.rank, peers);
      const ProcessGroup group(connect_ranks(context, options));
      const c10::Device device = late::device(context.rank);
      late_runtime().make_current(device);
      body(group, device);
      group.close();
    });
  }
  void expect_on_all(int num_ranks, const Body& body) {
    const RanksResult result = run_on_all(num_ranks, body);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  // Returns the failure of `body` on each rank.
  std::vector<std::string> failures_of(int num_ranks, const Body& body) {
    std::vector<std::string> failures(static_cast<size_t>(num_ranks));
    static_cast<void>(
        run_on_all(num_ranks, [&](const ProcessGroup& group, const c10::Device& device) {
          failures[static_cast<size_t>(group.rank())] = failure_of([&] { body(group, device); });
        }));
    return failures;
  }
};

}  // namespace cadre::testing
