// How a group gets its engines: one of the native ones by default, or what the program's factories
// make. MPI, Gloo, NCCL and test engines are plugged in with such a factory. A group may have two
// engines, one for memory of the CPU and one for memory of a device (collective/engine_set.h).
//
// Threads: a factory is called once for each group on each rank, by the thread that connects or
// splits the group. Blocking: the factory, until setup.deadline at most, that of the call that
// connects or splits the group. Lifetime: the objects to
// which a BackendSetup refers outlive the engine, even if the group keeps the engine until the
// process ends (step 3). Errors: those that the factory returns; the group is then not created on
// any rank.
//
// How to write a plug-in:
//  1. Derive from Backend (collective/backend.h). capabilities() states every collective, dtype,
//     reduction and device that the library behind it has; the group refuses all others and says
//     why. An engine with PREMUL_SUM in its reductions gets the factor in the Collective.
//  2. In the factory exchange what the library needs over setup.store, for example the id that
//     ncclGetUniqueId returns: rank 0 sets a key, the others get it until setup.deadline. The store
//     shows no keys of other groups, of earlier rounds or of attempts that failed.
//  3. submit() of a blocking library runs each collective (run_in_order). While it waits, it looks
//     at the deadline and at setup.interrupt, which is raised when a peer is lost, the group is
//     aborted or another rank fails. A library that cannot cancel what it has begun (MPI's
//     nonblocking collectives) sets capabilities().is_abortable = false. Its submit() then returns
//     a pending Completion, at once or when it sees the Interrupt or the deadline. A thread of the
//     engine completes it when the library no longer uses the buffers. After a failure the group
//     does not wait for that, but keeps the keep_alive of the call and the engine. A blocking call
//     without a keep_alive throws while the library may still use its buffers; the error says so,
//     and that the process must end.
//  4. submit() of a stream-ordered library enqueues on a stream of its own behind
//     Collective::after (with that stream as the current one, after->order_current_stream()), and
//     returns Completion::make_pending(end), where `end` is a point on this stream. A thread of the
//     engine that waits for the stream's events calls complete() with the result. Buffers on the
//     CPU get make_pending() without a point, so that Work::wait() waits for their results. The
//     engine copies what it needs of the OpContext later. The group raises the Interrupt at the
//     deadline of an enqueued call. An engine that sets is_abortable then ends the call and
//     completes it when the device no longer uses the buffers. If the device never gets there, the
//     group abandons the call as in step 3.
//  5. The ranks of a group must agree on (number, fingerprint) of each call. An engine that can
//     send a few more bytes compares these values, as the native engines do, and reports a
//     difference with OpProgress::set_mismatch(). For a stream-ordered engine the group compares
//     the calls that do not end. Otherwise the behaviour on a mismatch is that of the library.
// The group itself still provides point-to-point messages and the detection and reporting of
// failures. Symmetric buffers of a group with a plug-in engine are private memory.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/backend.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre {

struct BackendSetup {
  Rank rank;
  int world_size = 1;
  Device device = {};  // the device whose memory the engine is for
  // For an engine of a device: the group's engine for memory of the CPU. It runs one call at a
  // time, and submit() of the device's engine may call it for its own collectives. Null for a world
  // of one.
  Backend* host = nullptr;
  std::string group;  // the name of the group, which messages quote
  // The store of this group; null for a world of one that has no store.
  std::shared_ptr<Store> store;
  const os::Interrupt& interrupt;
  os::System& system;
  Deadline deadline;
  LogSink* log = nullptr;  // null: nothing is logged
};

using BackendFactory = std::function<Result<std::unique_ptr<Backend>>(const BackendSetup&)>;

// A device and the factory of the engine that works on its memory.
struct DeviceBackend {
  Device device = {};  // not the CPU
  BackendFactory make = {};
};

}  // namespace cadre
