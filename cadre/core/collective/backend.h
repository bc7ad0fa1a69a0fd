// The interface of every engine that moves and reduces bytes for a group.
//
// Threads: one call at a time, from the thread that holds the group's progress role. Blocking:
// submit() of a blocking engine runs the collectives one after the other. Each ends with its
// result, at the call's deadline, or when the group's Interrupt is raised. A stream-ordered engine
// only enqueues them. Lifetime: the Collectives, and the OpContext with its OpProgress, are
// borrowed until submit() returns; their buffers until the Completion is done.
// Errors: kTimeout and kPeerLost with OpProgress::waiting_for naming the peer; kAborted when the
// Interrupt was raised; kInvalidArgument, on all ranks, when a peer called another operation
// (OpProgress::set_mismatch) or when the sender and the receiver of a part of an all_to_all_v pass
// different sizes (part_mismatch). After an error the group is unusable, and the content of the
// buffers is undefined. Numerics: the order of additions is fixed by (op, dtype, count, world
// size), and does not depend on the order in which data arrives; all ranks end with identical bits.
// bfloat16 is accumulated in float32 and rounded once. Source: the operations are those of c10d,
// with one flat buffer for the input and one for the output.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/enum_set.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/collective/completion.h"
#include "cadre/core/collective/op.h"

namespace cadre {

// Says what an engine can do. A call that the engine of a group does not support throws on every
// rank before it gets a number, so no operation fails half-way. reduction_table.h defines the
// result of each reduction, and the reductions that no engine may compute.
struct Capabilities {
  std::string_view name;       // "host", "net", or the name of a plug-in
  bool shares_memory = false;  // the engine reads the symmetric buffers of peers in place
  // The group's Interrupt and the deadline end a submitted operation. False for a library that
  // cannot cancel an operation (MPI): its Completion is done only when the library no longer
  // touches the buffers, however late that is. After a failure or the deadline the group ends the
  // waits for such an operation, keeps its memory and the engine, and reports that the process must
  // end.
  bool is_abortable = true;
  // submit() does not block but enqueues the operation on a device: it begins behind
  // Collective::after, and completes after submit() has returned. The thread that issues a call
  // submits it if no earlier call of the group is left to submit.
  bool is_stream_ordered = false;
  // Says which algorithm is used for which size; written to the first line of the log.
  std::string algorithms = {};
  EnumSet<OpKind> kinds = {};  // collectives
  EnumSet<DType> dtypes = {};  // the dtypes that the engine can move
  // The supported reductions, by dtype. For an engine without PREMUL_SUM the group multiplies the
  // inputs on the CPU and submits a SUM.
  std::array<EnumSet<ReduceOp>, kNumDTypes> reductions = {};
  EnumSet<DeviceType> devices = {};  // the devices whose memory the buffers may be in

  // Returns whether the engine can run the collective. `op` is ignored unless the kind reduces, and
  // a barrier, which has no buffers, needs only its kind.
  bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceType device) const {
    if (!kinds.contains(kind)) return false;
    if (kind == OpKind::kBarrier) return true;
    return dtypes.contains(dtype) && devices.contains(device) &&
           (!reduces(kind) || can_reduce(dtype, op, device));
  }
  // Returns whether `op` is computed as the SUM of inputs that the group has multiplied by their
  // factors before it calls submit().
  bool needs_multiplied_inputs(DType dtype, ReduceOp op) const {
    return op == ReduceOp::kPremulSum &&
           !reductions[static_cast<size_t>(dtype)].contains(ReduceOp::kPremulSum);
  }

 private:
  // Returns whether the engine can compute the reduction. False for an op that needs multiplied
  // inputs if the memory is on a device or the engine is stream-ordered: the group cannot multiply
  // them before submit(), because another stream may still write them.
  bool can_reduce(DType dtype, ReduceOp op, DeviceType device) const {
    if (!needs_multiplied_inputs(dtype, op)) {
      return reductions[static_cast<size_t>(dtype)].contains(op);
    }
    return reductions[static_cast<size_t>(dtype)].contains(ReduceOp::kSum) &&
           device == DeviceType::kCpu && !is_stream_ordered;
  }
};

// Returns the capabilities of a CPU engine with every collective and every supported reduction of
// the table, except PREMUL_SUM, which runs as the SUM of multiplied inputs.
CADRE_EXPORT Capabilities full_capabilities(std::string_view name);

// Returns kInvalidArgument that names the call, what the engine supports instead, and the remedy.
Error unsupported(const Capabilities& capabilities, const Collective& collective);
// Returns unsupported() for a collective that the engine cannot run. REQUIRES: validate() has
// succeeded.
inline Status check_supported(const Capabilities& capabilities, const Collective& c) {
  if (capabilities.supports(c.kind, c.dtype, c.reduction.op(), c.device.type)) [[likely]]
    return {};
  return unsupported(capabilities, c);
}

class CADRE_EXPORT Backend {
 public:
  virtual ~Backend() = default;

  virtual Capabilities capabilities() const = 0;
  // Runs the collectives in order. Stops at the first error: later collectives are not run.
  // REQUIRES: there is at least one collective, and one fingerprint for each; validate() and
  // check_supported() have succeeded for each collective. kPremulSum is only passed to engines
  // whose `reductions` contain it.
  virtual Completion submit(const OpContext& op, std::span<const Collective> collectives) = 0;
};

// Implements submit() of a blocking engine whose `run` takes one collective and its context.
// Returns the first error.
template <typename Run>
Status run_in_order(const OpContext& op, std::span<const Collective> collectives, const Run& run) {
  Status status = run(op, collectives.front());
  for (size_t i = 1; i < collectives.size() && status.ok(); ++i) {
    op.progress.set_index(i);
    status = run(op.from(i), collectives[i]);
  }
  return status;
}

}  // namespace cadre
