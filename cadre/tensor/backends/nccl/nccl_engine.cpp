#include "cadre/tensor/backends/nccl/nccl_engine.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/queue/idle_thread.h"
#include "cadre/tensor/backends/nccl/nccl_calls.h"
#include "cadre/tensor/backends/nccl/nccl_communicator.h"
#include "cadre/tensor/backends/nccl/nccl_library.h"
#include "cadre/tensor/backends/nccl/nccl_reductions.h"
#include "cadre/tensor/device/call_order.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_identity.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/stream_point.h"

namespace cadre::nccl {
namespace {

using device::StreamPoint;

// The times between two polls of the device, which double from the first to the last.
constexpr Duration kFirstNap = std::chrono::microseconds(50);
constexpr Duration kLastNap = std::chrono::milliseconds(1);
// The time between two looks at the group's Interrupt while nothing is enqueued.
constexpr Duration kIdleNap = std::chrono::seconds(1);
// How long an error that may follow from the failure of another rank waits for the report of that
// failure, which names the cause.
constexpr Duration kReportTime = std::chrono::milliseconds(500);

Error error_of_device(const std::exception& thrown) {
  return Error(ErrorCode::kInternal, format("the device has failed: {}", thrown.what()));
}

class NcclEngine final : public Backend {
 public:
  NcclEngine(const BackendSetup& setup, const device::DeviceRuntime& runtime,
             std::unique_ptr<os::System> system, std::unique_ptr<NcclCommunicator> communicator)
      : rank_(setup.rank),
        world_size_(setup.world_size),
        device_(setup.device),
        runtime_(runtime),
        interrupt_(setup.interrupt),
        stream_(runtime.pooled_stream(device::to_c10(device_), device::StreamPriority::kHigh)),
        handle_(runtime.native_handle(stream_)),
        system_(std::move(system)),
        communicator_(std::move(communicator)),
        watch_(*system_, "cadre-nccl") {
    const std::lock_guard lock(mutex_);
    static_cast<void>(watch_.start([this] { watch(); }));  // no earlier thread is to be joined
  }

  // All calls have ended, or the group keeps this engine until the process ends.
  ~NcclEngine() override {
    std::unique_ptr<os::Thread> thread;
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
      watch_.unpark();
      thread = watch_.take();
    }
    if (thread != nullptr) thread->join();
  }

  Capabilities capabilities() const override {
    Capabilities can = full_capabilities("nccl");
    can.is_stream_ordered = true;
    can.kinds.erase(OpKind::kBarrier);  // has no memory, so the engine for the CPU runs it
    can.devices = {device_.type};
    for (size_t dtype = 0; dtype < kNumDTypes; ++dtype) {
      can.reductions[dtype] = nccl_reductions(static_cast<DType>(dtype));
    }
    return can;
  }

  // The caller's modes of autograd do not apply to the temporary tensors.
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(stream_);
    CADRE_RETURN_IF_ERROR(device::order_behind_callers(collectives));
    const Submission submission(*this);
    // The temporary tensors belong to this stream. So their memory can go back at once: only work
    // behind this call gets it.
    const PreparedCall call = prepare(collectives, world_size_);
    const Status issued = issue(call, op.deadline);
    const auto end = std::make_shared<const StreamPoint>(stream_);
    // A wait for a call that NCCL has refused blocks the host until the group has failed, and
    // throws.
    const Completion completion = Completion::make_pending(issued.ok() ? end : nullptr);
    const std::lock_guard lock(mutex_);
    enqueued_.push_back({end, completion, issued});
    watch_.unpark();
    return completion;
  }

 private:
  struct Enqueued {
    std::shared_ptr<const StreamPoint> end;
    Completion completion;
    Status issued;  // an error if the call was enqueued in part or not at all
  };

  // Keeps the watch thread from aborting the communicator during a submission.
  class Submission {
   public:
    explicit Submission(NcclEngine& engine) : engine_(engine) {
      const std::lock_guard lock(engine.mutex_);
      engine.is_submitting_ = true;
    }
    ~Submission() {
      const std::lock_guard lock(engine_.mutex_);
      engine_.is_submitting_ = false;
    }
    Submission(const Submission&) = delete;
    Submission& operator=(const Submission&) = delete;

   private:
    NcclEngine& engine_;
  };

  // An exception behind the first call of NCCL is an error of the call, whose memory the device may
  // use by then.
  Status issue(const PreparedCall& call, Deadline deadline) {
    CADRE_RETURN_IF_ERROR(communicator_->issue(groups_of(call.collectives), handle_, deadline));
    try {
      for (const auto& finish : call.finish) finish();
    } catch (const std::exception& thrown) {
      return error_of_device(thrown);
    }
    return {};
  }

  std::vector<CallGroup> groups_of(std::span<const Collective> collectives) const {
    std::vector<CallGroup> groups;
    for (const Collective& c : collectives) {
      const bool is_premultiplied = reduces(c.kind) && c.reduction.op() == ReduceOp::kPremulSum;
      groups.push_back({.calls = calls_of(c, rank_, world_size_),
                        .op = reduction_of(c.dtype, c.reduction.op()),
                        .factor = is_premultiplied ? c.reduction.factor() : std::nullopt,
                        .dtype = c.dtype});
    }
    return groups;
  }

  void watch() {
    Duration nap = kFirstNap;
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (is_stopping_) return watch_.note_end();
      }
      try {
        nap = look(nap);
      } catch (const std::exception& thrown) {
        note_failure(thrown);
        nap = kLastNap;
      }
      static_cast<void>(watch_.park(nap));
    }
  }

  // Ends calls that the device has done or that have failed. Returns the time until the next look.
  Duration look(Duration last_nap) {
    runtime_.make_current(device::to_c10(device_));
    if (is_idle()) {
      // Kernels of other ranks may wait for this communicator.
      if (interrupt_.is_raised()) fail_all(group_has_failed());
      return kIdleNap;
    }
    if (const Status failed = failure(); !failed.ok()) {
      fail_all(failed.error());
      return kLastNap;
    }
    return complete_ended() ? kFirstNap : std::min(2 * last_nap, kLastNap);
  }

  bool is_idle() {
    const std::lock_guard lock(mutex_);
    return enqueued_.empty();
  }

  // An exception of the watch thread becomes the error of the oldest call, and so the failure of
  // the group.
  void note_failure(const std::exception& thrown) {
    const std::lock_guard lock(mutex_);
    if (enqueued_.empty() || !enqueued_.front().issued.ok()) return;
    enqueued_.front().issued =
        Error(ErrorCode::kInternal,
              format("the thread that watches the calls of NCCL has failed: {}", thrown.what()));
  }

  // Returns why the enqueued calls must be ended.
  Status failure() {
    {
      const std::lock_guard lock(mutex_);
      for (const Enqueued& call : enqueued_) CADRE_RETURN_IF_ERROR(call.issued);
    }
    if (interrupt_.is_raised()) return group_has_failed();
    const Status state = communicator_->state();
    if (!state.ok() && state.error().code() == ErrorCode::kUnavailable) await_report();
    return state;
  }

  void await_report() {
    const std::unique_ptr<os::Waiter> waiter = system_->make_waiter();
    const Deadline deadline = system_->deadline_in(kReportTime);
    while (!interrupt_.is_raised() && !deadline.has_passed(system_->now())) {
      waiter->park(system_->deadline_in(kLastNap));
    }
  }

  // Completes the oldest call if the device has reached its end. Returns false if it has not. A
  // device that cannot say is a failure, which ends all calls: it may still use their memory.
  bool complete_ended() {
    {
      const std::lock_guard lock(mutex_);
      const Result<bool> has_ended = has_happened(*enqueued_.front().end);
      if (!has_ended.ok()) {
        enqueued_.front().issued = has_ended.error();
        return true;
      }
      if (!*has_ended) return false;
    }
    const Enqueued ended = pop_oldest();
    ended.completion.complete(ended.issued);
    return true;
  }

  static Result<bool> has_happened(const StreamPoint& point) {
    try {
      return point.has_happened();
    } catch (const c10::Error& thrown) {
      return error_of_device(thrown);
    }
  }

  // Lets NCCL end its kernels, and ends the calls when the device no longer uses their memory. If
  // the caller's own kernels before a call do not end, that is never: the group abandons the call,
  // and keeps this engine and the memory.
  void fail_all(const Error& error) {
    size_t num_failed = 0;
    {
      const std::lock_guard lock(mutex_);
      if (is_submitting_) return;  // the submission sees the same error, or ends
      num_failed = enqueued_.size();
    }
    communicator_->abort();
    if (num_failed == 0) return;
    await_device();
    for (; num_failed > 0; --num_failed) pop_oldest().completion.complete(error);
  }

  Enqueued pop_oldest() {
    const std::lock_guard lock(mutex_);
    Enqueued oldest = std::move(enqueued_.front());
    enqueued_.pop_front();
    return oldest;
  }

  void await_device() const {
    const std::unique_ptr<os::Waiter> waiter = system_->make_waiter();
    try {
      const StreamPoint last(stream_);
      while (!last.has_happened()) waiter->park(system_->deadline_in(kLastNap));
    } catch (const c10::Error&) {
      // A device that has failed runs no kernel any more.
    }
  }

  const Rank rank_;
  const int world_size_;
  const Device device_;
  const device::DeviceRuntime runtime_;
  const os::Interrupt& interrupt_;
  const c10::Stream stream_;
  void* const handle_;
  // A System of its own, because the group may keep this engine longer than its System.
  const std::unique_ptr<os::System> system_;
  const std::unique_ptr<NcclCommunicator> communicator_;
  std::mutex mutex_;  // guards the members below
  std::deque<Enqueued> enqueued_;
  IdleThread watch_;
  bool is_submitting_ = false;
  bool is_stopping_ = false;
};

// What the factory has found on this rank.
struct Found {
  std::optional<device::DeviceRuntime> runtime = {};
  std::optional<Library> library = {};
  Readiness readiness = {};
};

Found look(const BackendSetup& setup, const NcclOptions& options) {
  Found found;
  const auto refuse = [&](std::string reason) {
    found.readiness.why_not = std::move(reason);
    return found;
  };
  if (setup.device.type != options.device_type) {
    return refuse(format("NCCL works on {} devices, and this rank has {}",
                         to_string(options.device_type), to_string(setup.device)));
  }
  const device::FoundDevices devices = device::find_devices(device::to_c10(setup.device).type());
  if (!devices.runtime) return refuse(devices.reason);
  found.runtime = devices.runtime;
  const c10::Device device = device::to_c10(setup.device);
  static_cast<void>(devices.runtime->native_handle(devices.runtime->current_stream(device)));
  Result<Library> library = Library::load(options.library);
  if (!library.ok()) return refuse(library.error().message());
  found.library = std::move(library).value();
  found.readiness.version = found.library->version();
  found.readiness.device = device::identity_of(setup.device, setup.system);
  return found;
}

Result<UniqueId> make_id(const Library& library) {
  UniqueId id{};
  const Code made = library.api().get_unique_id(&id);
  if (made == Code::kSuccess) return id;
  return Error(ErrorCode::kUnavailable, library.describe(made, nullptr));
}

}  // namespace

Result<MadeEngine> make_engine(const BackendSetup& setup, const NcclOptions& options,
                               const Demand& demand) {
  Found found;
  try {
    if (demand.why_not.empty()) found = look(setup, options);
  } catch (const std::exception& thrown) {
    found.readiness.why_not = thrown.what();
  }
  found.readiness.choice = demand.choice;
  if (!demand.why_not.empty()) found.readiness.why_not = demand.why_not;
  const Result<Decision> decision =
      agree(setup, found.readiness, demand.shared, [&] { return make_id(*found.library); });
  if (!decision.ok()) return decision.error();
  if (!decision->why_not.empty()) return MadeEngine{nullptr, decision->why_not};
  found.runtime->make_current(device::to_c10(setup.device));
  std::unique_ptr<os::System> system = os::make_native_system();
  auto communicator = NcclCommunicator::make(setup, *system, *found.library, decision->id);
  if (!communicator.ok()) return communicator.error();
  return MadeEngine{std::make_unique<NcclEngine>(setup, *found.runtime, std::move(system),
                                                 std::move(communicator).value()),
                    format("NCCL {}", found.library->version())};
}

}  // namespace cadre::nccl
