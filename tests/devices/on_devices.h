// Groups of ranks on the late device, for tests. Each rank is a thread with a device of its own,
// and a group with an engine for that device.
//
// Threads: one for each rank. Blocking: until all ranks have ended. Errors: an exception of a rank
// is a failure of the test.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/backends/device_engine.h"
#include "cadre/tensor/backends/staged_engine.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/fake_nccl/fake_nccl.h"
#include "cadre/testing/torch/late_device/late_device.h"
#include "cadre/testing/torch/late_engine.h"

namespace cadre::testing {

// The engine for memory of the device: one that only enqueues, that of NCCL with the fake NCCL, or
// the staged one, also with small pieces.
enum class DeviceEngine { kEnqueues, kNccl, kStaged, kStagedInPieces };

inline constexpr size_t kSmallPieceBytes = 32;

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
                                       const std::shared_ptr<RanksInProcess>& peers,
                                       size_t piece_bytes = kSmallPieceBytes) {
  if (engine == DeviceEngine::kEnqueues) return late_engine(rank, peers);
  const Device device = *device::to_core(late::device(rank));
  if (engine == DeviceEngine::kNccl) {
    return {.device = device,
            .make = device_engine(DeviceEngineChoice::kNccl, fake_nccl_options())};
  }
  return {.device = device,
          .make = engine == DeviceEngine::kStaged ? staged_engine() : staged_engine(piece_bytes)};
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

// Returns which operations the host has waited for on a late device since `before`; "" if none.
inline std::string waits_since(const late::Counts& before, int index) {
  const late::Counts after = late::counts(index);
  std::string text;
  for (const auto& [name, number] : after.synchronous) {
    const auto known = before.synchronous.find(name);
    const uint64_t earlier = known == before.synchronous.end() ? 0 : known->second;
    if (number > earlier) text += format("{} x {}; ", number - earlier, name);
  }
  if (after.waits > before.waits) text += format("{} waits", after.waits - before.waits);
  return text;
}

// Returns how often the host has waited for a late device since `before`.
inline uint64_t num_waits_since(const late::Counts& before, int index) {
  const late::Counts after = late::counts(index);
  return after.num_synchronous() + after.waits - before.num_synchronous() - before.waits;
}

// Throws unless `failure` is that of an invalid argument and contains `text`.
inline void require_refusal(const std::string& failure, const std::string& text) {
  require(failure.find("kInvalidArgument") != std::string::npos &&
              failure.find(text) != std::string::npos,
          failure.empty() ? "no refusal with: " + text : failure);
}

// Returns x, for a forward whose backward ends with a kernel of 50 ms on the stream of the forward.
// What a wrapper enqueues on that stream at the end of the backward is later than what other
// streams run.
inline at::Tensor with_late_end_of_backward(const at::Tensor& x) {
  const at::Tensor copy = x.detach().requires_grad_() * 1;
  copy.register_hook([](const at::Tensor& gradient) {
    late::enqueue(late_runtime().current_stream(gradient.device()),
                  [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  });
  return copy;
}

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

  // Returns the size of the pieces of DeviceEngine::kStagedInPieces.
  virtual size_t piece_bytes() const { return kSmallPieceBytes; }

  // Returns the share of the cases that this run tests on the engine: each case on one of them.
  template <typename Case>
  static std::vector<Case> share_on_engine(const std::vector<Case>& cases, uint64_t offset = 0) {
    return share_of(cases, static_cast<uint64_t>(GetParam()) + offset);
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
      options.device_backend = device_backend_of(GetParam(), context.rank, peers, piece_bytes());
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
