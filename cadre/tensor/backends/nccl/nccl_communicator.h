// A communicator of NCCL that never blocks the host: calls of NCCL return at once, and this class
// polls until NCCL has done what they began.
//
// Threads: issue() and state() from any thread, one call of NCCL at a time; abort() and close()
// once, while no other thread is in issue(). Blocking: make(), until the deadline; issue(), until
// NCCL has enqueued the calls, which may need the other ranks at the first use of a connection;
// abort(), until NCCL has ended its kernels, at most kMaxCallTime; close(), at most kCloseTime +
// kMaxCallTime. A communicator that NCCL has not ended by then is abandoned, which is logged.
// Errors: kUnavailable for a communicator that cannot be made; of issue(): kTimeout, kAborted, and
// kInternal or kUnavailable with the text of NCCL. After such an error of issue() the device may
// still begin its calls, until abort() has returned.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/backends/nccl/nccl_calls.h"
#include "cadre/tensor/backends/nccl/nccl_library.h"

namespace cadre::nccl {

// Returns kAborted, with which a call ends when the group has failed.
Error group_has_failed();

// The calls of one collective.
struct CallGroup {
  std::vector<NcclCall> calls;
  RedOp op = RedOp::kSum;
  // The factor of a kPremulSum, and the dtype in which NCCL multiplies.
  std::optional<double> factor = {};
  DType dtype = DType::kFloat32;
};

class NcclCommunicator final {
 public:
  // How long close() waits for the other ranks to take what this rank has sent.
  static constexpr Duration kCloseTime = std::chrono::seconds(1);

  // REQUIRES: the device of this rank is the current one of the thread. `system` outlives the
  // communicator, and so do the Interrupt and the log of `setup`.
  static Result<std::unique_ptr<NcclCommunicator>> make(const BackendSetup& setup,
                                                        os::System& system, const Library& library,
                                                        const UniqueId& id);
  // Makes an object without a communicator, for make().
  NcclCommunicator(const BackendSetup& setup, os::System& system, const Library& library)
      : system_(system),
        library_(library),
        interrupt_(setup.interrupt),
        log_(setup.log),
        name_(format("group={} rank={}", setup.group, setup.rank)) {}
  ~NcclCommunicator() { close(); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Enqueues all calls on the stream, as one group.
  Status issue(std::span<const CallGroup> groups, StreamHandle stream, Deadline deadline);
  // Returns the error that NCCL has found since, if there is one.
  Status state();
  // Lets NCCL end its kernels, in whatever state they are. Nothing can be issued afterwards.
  void abort();
  void close();

 private:
  Code begin_group(std::span<const CallGroup> groups, StreamHandle stream);
  Code call(const NcclCall& call, RedOp op, StreamHandle stream) const;
  Code make_operation(const CallGroup& group, RedOp& op);
  void destroy_operations();
  // Polls while NCCL is at work. `is_over` may end the wait with an error.
  Status settle(Code code, Deadline deadline, const std::function<Status()>& is_over);
  Error error_of(Code code) const;
  // Ends the communicator with ncclCommAbort() or ncclCommDestroy().
  void end(Comm* comm, Code (*function)(Comm*), std::string_view function_name) const;

  os::System& system_;
  const Library library_;
  const os::Interrupt& interrupt_;
  LogSink* const log_;  // may be null
  const std::string name_;
  std::mutex mutex_;  // guards comm_ and the calls of NCCL with it, except for abort
  Comm* comm_ = nullptr;
  std::vector<RedOp> operations_;  // made for the group that is being issued
};

}  // namespace cadre::nccl
