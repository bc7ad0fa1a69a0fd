#include "cadre/tensor/backends/staged_engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/reduction_table.h"
#include "cadre/core/collective/scale.h"
#include "cadre/tensor/backends/make_staged_engine.h"
#include "cadre/tensor/backends/nccl/nccl_agreement.h"
#include "cadre/tensor/backends/staged_pieces.h"
#include "cadre/tensor/device/call_order.h"
#include "cadre/tensor/device/core_device.h"
#include "cadre/tensor/device/device_runtime.h"
#include "cadre/tensor/device/pinned_tensor.h"
#include "cadre/tensor/device/stream_point.h"

namespace cadre {
namespace {

using device::StreamPoint;
using staged::Copy;
using staged::Piece;

// The interval at which a wait for the device checks whether the group has failed.
constexpr Duration kLookTime = std::chrono::milliseconds(5);
// How long a call that has failed waits for its copies.
constexpr Duration kSettleTime = std::chrono::seconds(1);
constexpr const char* kDevicePhase = "device";

class StagedEngine final : public Backend {
 public:
  StagedEngine(const BackendSetup& setup, const device::DeviceRuntime& runtime, size_t piece_bytes)
      : rank_(setup.rank),
        world_size_(setup.world_size),
        device_(setup.device),
        system_(setup.system),
        interrupt_(setup.interrupt),
        host_(setup.host),
        piece_bytes_(piece_bytes),
        stream_(runtime.pooled_stream(device::to_c10(device_), device::StreamPriority::kHigh)) {}

  Capabilities capabilities() const override {
    Capabilities can = host_ == nullptr ? full_capabilities("solo") : host_->capabilities();
    can.name = "staged";
    can.shares_memory = false;
    can.devices = {device_.type};
    // The inputs are multiplied in the memory of the pieces.
    for (size_t dtype = 0; dtype < kNumDTypes; ++dtype) {
      const auto possible = supported_reductions(static_cast<DType>(dtype));
      if (possible.contains(ReduceOp::kPremulSum) &&
          can.reductions[dtype].contains(ReduceOp::kSum)) {
        can.reductions[dtype].insert(ReduceOp::kPremulSum);
      }
    }
    return can;
  }

  // The caller's modes of autograd do not apply to the pinned memory, which outlives the call.
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override {
    const c10::InferenceMode no_inference(false);
    const at::NoGradGuard no_grad;
    const c10::StreamGuard guard(stream_);
    CADRE_RETURN_IF_ERROR(device::order_behind_callers(collectives));
    return run_in_order(op, collectives,
                        [this](const OpContext& one, const Collective& c) { return run(one, c); });
  }

 private:
  Status run(const OpContext& op, const Collective& collective) {
    const SettledAtError settled(*this);
    return run_pieces(op, collective);
  }

  // Waits at the end of a call that has failed until the device has done the copies that were
  // enqueued for it, because the group gives up the memory of the call. The device does not get to
  // them if the caller's own work before the call has not ended; then only copies from the inputs
  // are left, and the allocator of pinned memory waits for these.
  class SettledAtError {
   public:
    explicit SettledAtError(StagedEngine& engine) : engine_(engine) {}
    ~SettledAtError() {
      if (engine_.is_settled_) return;
      try {
        static_cast<void>(StreamPoint(engine_.stream_)
                              .wait(engine_.system_, engine_.system_.deadline_in(kSettleTime)));
      } catch (const c10::Error&) {
        // The device has failed, and the call ends with its error.
      }
      engine_.is_settled_ = true;
    }

   private:
    StagedEngine& engine_;
  };

  // While the host runs a piece, the copies of its neighbours are on the stream. A piece is copied
  // into the memory of the one before the previous one, behind the copies from it.
  Status run_pieces(const OpContext& op, const Collective& collective) {
    const std::vector<Piece> pieces =
        staged::pieces_of(collective, rank_, world_size_, piece_bytes_);
    reserve(pieces);
    is_settled_ = false;
    std::optional<StreamPoint> copied = copy_to_host(pieces.front(), memory_of(0));
    for (size_t i = 0; i < pieces.size(); ++i) {
      std::optional<StreamPoint> next;
      if (i + 1 < pieces.size()) next = copy_to_host(pieces[i + 1], memory_of(i + 1));
      CADRE_RETURN_IF_ERROR(await(*copied, op));
      CADRE_RETURN_IF_ERROR(run_on_host(op, collective, pieces[i], memory_of(i)));
      copy_to_device(pieces[i], memory_of(i));
      copied = std::move(next);
    }
    const Status ended = await(StreamPoint(stream_), op);
    is_settled_ = ended.ok();
    return ended;
  }

  at::Tensor& memory_of(size_t piece) { return memory_[piece % memory_.size()]; }

  // Makes the memory of both slots as large as the largest piece. No copy uses it now.
  void reserve(std::span<const Piece> pieces) {
    size_t num_bytes = 1;
    for (const Piece& piece : pieces) num_bytes = std::max(num_bytes, piece.num_bytes);
    const size_t num_used = std::min(pieces.size(), memory_.size());
    for (size_t i = 0; i < num_used; ++i) {
      if (memory_[i].defined() && memory_[i].nbytes() >= num_bytes) continue;
      memory_[i].reset();
      memory_[i] = device::empty_pinned(device::to_c10(device_).type(),
                                        {static_cast<int64_t>(num_bytes)}, at::kByte);
    }
  }

  at::Tensor on_device(const Copy& copy) const {
    const c10::Device device = device::to_c10(device_);
    return at::from_blob(
        copy.on_device, {static_cast<int64_t>(copy.num_bytes)}, [](void*) {},
        at::TensorOptions().dtype(at::kByte).device(device), device);
  }
  static at::Tensor on_host(const Copy& copy, const at::Tensor& memory) {
    return memory.narrow(0, static_cast<int64_t>(copy.offset),
                         static_cast<int64_t>(copy.num_bytes));
  }

  // Returns the point at which the piece is on the host.
  StreamPoint copy_to_host(const Piece& piece, const at::Tensor& memory) {
    for (const Copy& copy : piece.to_host) {
      if (copy.num_bytes > 0) on_host(copy, memory).copy_(on_device(copy), /*non_blocking=*/true);
    }
    return StreamPoint(stream_);
  }

  void copy_to_device(const Piece& piece, const at::Tensor& memory) {
    for (const Copy& copy : piece.to_device) {
      if (copy.num_bytes > 0) on_device(copy).copy_(on_host(copy, memory), /*non_blocking=*/true);
    }
  }

  Status run_on_host(const OpContext& op, const Collective& collective, const Piece& piece,
                     const at::Tensor& memory) {
    auto* const begin = static_cast<std::byte*>(memory.mutable_data_ptr());
    Collective on_host = collective;
    on_host.device = {};
    on_host.after = nullptr;
    on_host.in = {begin + piece.in.offset, piece.in.num_bytes};
    on_host.out = {begin + piece.out.offset, piece.out.num_bytes};
    if (on_host.reduction.op() == ReduceOp::kPremulSum && reduces(on_host.kind)) {
      scale(begin + piece.in.offset, on_host.in.data(), on_host.in.size() / size_of(on_host.dtype),
            on_host.dtype, *on_host.reduction.factor());
      on_host.reduction = ReduceOp::kSum;
    }
    if (host_ != nullptr) {
      return host_->submit(op, {&on_host, 1}).status();  // the engine blocks, so the call has ended
    }
    if (on_host.in.data() != on_host.out.data() && !on_host.out.empty()) {
      std::memmove(on_host.out.data(), on_host.in.data(), on_host.out.size());
    }
    return {};
  }

  // Waits on the host until the device has reached the point.
  Status await(const StreamPoint& point, const OpContext& op) {
    op.progress.set_phase(kDevicePhase);
    while (true) {
      const Status waited =
          point.wait(system_, op.deadline.earlier(system_.deadline_in(kLookTime)));
      if (waited.ok() || waited.error().code() != ErrorCode::kTimeout) return waited;
      if (interrupt_.is_raised()) return Error(ErrorCode::kAborted, "the group has failed");
      if (op.deadline.has_passed(system_.now())) return waited;
    }
  }

  const Rank rank_;
  const int world_size_;
  const Device device_;
  os::System& system_;
  const os::Interrupt& interrupt_;
  Backend* const host_;
  const size_t piece_bytes_;
  const c10::Stream stream_;
  std::array<at::Tensor, 2> memory_;  // pinned
  bool is_settled_ = true;            // no copy of the last call may be left on the stream
};

}  // namespace

Result<std::unique_ptr<Backend>> make_staged_engine(const BackendSetup& setup, size_t piece_bytes) {
  const device::FoundDevices found = device::find_devices(device::to_c10(setup.device).type());
  if (!found.runtime) return Error(ErrorCode::kUnavailable, found.reason);
  if (found.runtime->pinned_allocator() == nullptr) {
    return Error(ErrorCode::kUnavailable,
                 format("the devices of type {} have no pinned memory of the host, through which "
                        "the staged engine copies; choose another engine",
                        to_string(setup.device.type)));
  }
  if (setup.host != nullptr) {
    const Capabilities host = setup.host->capabilities();
    if (!host.is_abortable || host.is_stream_ordered) {
      return Error(ErrorCode::kInvalidArgument,
                   format("the staged engine needs an engine for memory of the CPU whose calls "
                          "block and end at the deadline, and \"{}\" is none; choose another one",
                          host.name));
    }
  }
  return std::unique_ptr<Backend>(
      std::make_unique<StagedEngine>(setup, *found.runtime, piece_bytes));
}

BackendFactory staged_engine(size_t piece_bytes) {
  return [piece_bytes](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    const nccl::Readiness own{.choice = format("staged_engine({})", piece_bytes),
                              .why_not = "the program chooses the staged engine"};
    const auto agreed = nccl::agree(setup, own, nccl::SharedDevices::kLeftToNccl,
                                    [] { return Result<nccl::UniqueId>(nccl::UniqueId()); });
    if (!agreed.ok()) return agreed.error();
    return make_staged_engine(setup, piece_bytes);
  };
}

}  // namespace cadre
