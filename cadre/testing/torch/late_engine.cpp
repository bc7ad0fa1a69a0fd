#include "cadre/testing/torch/late_engine.h"

#include <c10/core/StreamGuard.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/core/store/store.h"
#include "cadre/tensor/device/call_order.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/stream_point.h"
#include "cadre/testing/core/fake_stream_backend.h"
#include "cadre/testing/torch/late_device/late_device.h"

namespace cadre::testing {
namespace {

// How long an enqueued operation may take before it counts as an error of the test.
constexpr Duration kStreamPatience = std::chrono::seconds(60);
constexpr Duration kLookTime = std::chrono::microseconds(50);

device::DeviceRuntime late_runtime() {
  late::register_device();
  return *device::find_devices(late::device().type()).runtime;
}

class LateEngine final : public Backend {
 public:
  LateEngine(FakeRank self, Device device, std::shared_ptr<FakePeers> peers,
             std::shared_ptr<FakeCalls> calls, Duration report_delay)
      : self_(std::move(self)),
        device_(device),
        peers_(std::move(peers)),
        calls_(std::move(calls)),
        report_delay_(report_delay),
        stream_(
            late_runtime().pooled_stream(device::to_c10(device), device::StreamPriority::kHigh)),
        watch_(self_.system) {}

  Capabilities capabilities() const override {
    Capabilities can = full_capabilities("late");
    can.is_abortable = false;
    can.is_stream_ordered = true;
    can.devices = {device_.type};
    for (size_t dtype = 0; dtype < kNumDTypes; ++dtype) {
      can.reductions[dtype] = supported_reductions(static_cast<DType>(dtype));
    }
    peers_->restrict(can);
    return can;
  }

  Completion submit(const OpContext& op, std::span<const Collective> collectives) override {
    const c10::StreamGuard guard(stream_);
    CADRE_RETURN_IF_ERROR(device::order_behind_callers(collectives));
    const auto call = std::make_shared<Call>(op, collectives);
    late::enqueue(stream_, [this, call] { run(*call); });
    const auto end = std::make_shared<const device::StreamPoint>(stream_);
    const Completion completion = Completion::make_pending(end);
    watch_.enqueue([this, call, end, completion] {
      const bool has_ended = has_happened(*end);
      delay_report();
      completion.complete(has_ended ? call->status : late_end());
    });
    return completion;
  }

 private:
  // Copies of the arguments of submit(), because these may be destroyed before the stream runs.
  struct Call {
    Call(const OpContext& op, std::span<const Collective> of)
        : number(op.number),
          fingerprints(op.fingerprints.begin(), op.fingerprints.end()),
          deadline(op.deadline),
          collectives(of.begin(), of.end()) {}

    const uint64_t number;
    const std::vector<Fingerprint> fingerprints;
    const Deadline deadline;
    std::vector<Collective> collectives;
    Status status;
  };

  // Asks again and again, as the watchdog of NCCL does: the device counts waits of the host.
  bool has_happened(const device::StreamPoint& point) const {
    const Deadline deadline = self_.system.deadline_in(kStreamPatience);
    const std::unique_ptr<os::Waiter> waiter = self_.system.make_waiter();
    while (!point.has_happened() && !deadline.has_passed(self_.system.now())) {
      static_cast<void>(waiter->park(self_.system.deadline_in(kLookTime)));
    }
    return point.has_happened();
  }
  void delay_report() const {
    const Deadline end = self_.system.deadline_in(report_delay_);
    const std::unique_ptr<os::Waiter> waiter = self_.system.make_waiter();
    while (!end.has_passed(self_.system.now())) static_cast<void>(waiter->park(end));
  }
  static Error late_end() {
    return Error(ErrorCode::kTimeout, "the late device has not ended an operation in 60 s");
  }

  static std::byte* on_host(const std::byte* address) {
    return address == nullptr ? nullptr : static_cast<std::byte*>(late::host_address(address));
  }

  // Runs in the thread of the stream.
  void run(Call& call) {
    for (Collective& c : call.collectives) {
      c.in = {on_host(c.in.data()), c.in.size()};
      c.out = {on_host(c.out.data()), c.out.size()};
    }
    OpProgress progress;
    const OpContext op{call.number, call.fingerprints, call.deadline, progress};
    call.status =
        run_in_order(op, call.collectives, [this](const OpContext& one, const Collective& c) {
          return calls_->run(*peers_, self_, one, c);
        });
  }

  const FakeRank self_;
  const Device device_;
  const std::shared_ptr<FakePeers> peers_;
  const std::shared_ptr<FakeCalls> calls_;
  const Duration report_delay_;
  const c10::Stream stream_;
  FakeStream watch_;  // completes the operations; the last member, because it uses the others
};

// Returns a name that no other group of the process has: the groups of an axis of a mesh have one
// name.
Result<std::string> unique_name(const BackendSetup& setup) {
  static std::atomic<int> num_groups{0};  // counts for the process, in which the fake peers meet
  if (setup.store == nullptr) return format("{}.{}", setup.group, num_groups++);
  constexpr std::string_view kKey = "late_engine/name";
  if (setup.rank == 0) {
    const auto is_set =
        setup.store->set(kKey, format("{}.{}", setup.group, num_groups++), setup.deadline);
    if (!is_set.ok()) return is_set.error();
  }
  return setup.store->get(kKey, setup.deadline);
}

}  // namespace

DeviceBackend late_engine(int index, std::shared_ptr<FakePeers> peers,
                          std::shared_ptr<FakeCalls> calls, Duration report_delay) {
  const Device device = *device::to_core(late::device(index));
  return {.device = device,
          .make = [=](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
            Result<std::string> group = unique_name(setup);
            if (!group.ok()) return std::move(group).error();
            return std::unique_ptr<Backend>(
                std::make_unique<LateEngine>(FakeRank{.group = *std::move(group),
                                                      .rank = setup.rank,
                                                      .world_size = setup.world_size,
                                                      .system = process_system()},
                                             setup.device, peers, calls, report_delay));
          }};
}

}  // namespace cadre::testing
