#include "cadre/tensor/backends/nccl/nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/tensor/backends/nccl/bounded_call.h"
#include "cadre/tensor/backends/nccl/nccl_agreement.h"

namespace cadre::nccl {
namespace {

// The times between two polls, which double from the first to the last.
constexpr Duration kFirstPause = std::chrono::microseconds(20);
constexpr Duration kLastPause = std::chrono::milliseconds(1);
// The interval at which a rank that connects looks whether another rank has given up.
constexpr Duration kFailureLookTime = std::chrono::milliseconds(100);

}  // namespace

Error group_has_failed() {
  return Error(ErrorCode::kAborted, "the group has failed");
}

Result<std::unique_ptr<NcclCommunicator>> NcclCommunicator::make(const BackendSetup& setup,
                                                                 os::System& system,
                                                                 const Library& library,
                                                                 const UniqueId& id) {
  auto made = std::make_unique<NcclCommunicator>(setup, system, library);
  Config config;
  config.blocking = 0;
  const Code begun = library.api().comm_init_rank_config(&made->comm_, setup.world_size, id,
                                                         setup.rank.value, &config);
  TimePoint last_look = system.now();
  bool is_own_failure = true;
  const auto look = [&]() -> Status {
    const bool has_failed = setup.interrupt.is_raised();
    if (!has_failed && system.now() - last_look < kFailureLookTime) return {};
    last_look = system.now();
    if (const auto failure = reported_failure(setup)) {
      is_own_failure = false;
      return Error(ErrorCode::kUnavailable, *failure);
    }
    return has_failed ? Status(group_has_failed()) : Status();
  };
  const Status connected = made->settle(begun, setup.deadline, look);
  if (connected.ok()) return made;
  made->abort();
  const ErrorCode code = connected.error().code();
  is_own_failure = is_own_failure && code != ErrorCode::kTimeout && code != ErrorCode::kAborted;
  if (!is_own_failure) return connected.error();
  const std::string text = format("rank {} cannot connect to the others with NCCL: {}", setup.rank,
                                  connected.error().message());
  report_failure(setup, text);
  return Error(ErrorCode::kUnavailable, text);
}

Status NcclCommunicator::settle(Code code, Deadline deadline,
                                const std::function<Status()>& is_over) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  for (Duration pause = kFirstPause; code == Code::kInProgress;
       pause = std::min(2 * pause, kLastPause)) {
    CADRE_RETURN_IF_ERROR(is_over());
    if (deadline.has_passed(system_.now())) {
      return Error(ErrorCode::kTimeout, "NCCL has not connected the ranks before the deadline");
    }
    waiter->park(deadline.earlier(system_.deadline_in(pause)));
    const std::lock_guard lock(mutex_);
    if (library_.api().comm_get_async_error(comm_, &code) != Code::kSuccess) {
      code = Code::kInternalError;
    }
  }
  if (code == Code::kSuccess) return {};
  const std::lock_guard lock(mutex_);
  return error_of(code);
}

Status NcclCommunicator::issue(std::span<const CallGroup> groups, StreamHandle stream,
                               Deadline deadline) {
  Code begun;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return group_has_failed();
    begun = begin_group(groups, stream);
  }
  const Status issued = settle(begun, deadline, [this]() -> Status {
    return interrupt_.is_raised() ? Status(group_has_failed()) : Status();
  });
  const std::lock_guard lock(mutex_);
  if (issued.ok()) destroy_operations();
  return issued;
}

// NCCL counts starts and ends of groups for each thread, so a group that has begun is ended even if
// a call in it has failed.
Code NcclCommunicator::begin_group(std::span<const CallGroup> groups, StreamHandle stream) {
  std::vector<RedOp> ops;
  for (const CallGroup& group : groups) {
    RedOp op = group.op;
    if (const Code made = make_operation(group, op); made != Code::kSuccess) return made;
    ops.push_back(op);
  }
  if (const Code started = library_.api().group_start(); started != Code::kSuccess) return started;
  Code first = Code::kSuccess;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const NcclCall& one : groups[i].calls) {
      const Code called = call(one, ops[i], stream);
      if (called == Code::kSuccess || called == Code::kInProgress) continue;
      if (first == Code::kSuccess) first = called;
    }
  }
  const Code ended = library_.api().group_end();
  return first == Code::kSuccess ? ended : first;
}

Code NcclCommunicator::call(const NcclCall& c, RedOp op, StreamHandle stream) const {
  const Api& api = library_.api();
  switch (c.kind) {
    case NcclCall::Kind::kAllReduce:
      return api.all_reduce(c.in, c.out, c.count, c.type, op, comm_, stream);
    case NcclCall::Kind::kBroadcast:
      return api.broadcast(c.in, c.out, c.count, c.type, c.rank, comm_, stream);
    case NcclCall::Kind::kReduce:
      return api.reduce(c.in, c.out, c.count, c.type, op, c.rank, comm_, stream);
    case NcclCall::Kind::kAllGather:
      return api.all_gather(c.in, c.out, c.count, c.type, comm_, stream);
    case NcclCall::Kind::kReduceScatter:
      return api.reduce_scatter(c.in, c.out, c.count, c.type, op, comm_, stream);
    case NcclCall::Kind::kSend:
      return api.send(c.in, c.count, c.type, c.rank, comm_, stream);
    case NcclCall::Kind::kRecv:
      return api.recv(c.out, c.count, c.type, c.rank, comm_, stream);
  }
  return Code::kInvalidArgument;
}

Code NcclCommunicator::make_operation(const CallGroup& group, RedOp& op) {
  if (!group.factor || group.calls.empty()) return Code::kSuccess;
  double as_double = *group.factor;
  auto as_float = static_cast<float>(as_double);
  void* scalar = &as_float;
  if (group.dtype == DType::kFloat64) scalar = &as_double;
  const Code made = library_.api().red_op_create_pre_mul_sum(
      &op, scalar, reduced_type(group.dtype), ScalarResidence::kHostImmediate, comm_);
  if (made == Code::kSuccess) operations_.push_back(op);
  return made;
}

void NcclCommunicator::destroy_operations() {
  for (const RedOp op : std::exchange(operations_, {})) {
    if (comm_ != nullptr) static_cast<void>(library_.api().red_op_destroy(op, comm_));
  }
}

Status NcclCommunicator::state() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return group_has_failed();
  Code code = Code::kSuccess;
  const Code asked = library_.api().comm_get_async_error(comm_, &code);
  if (asked != Code::kSuccess) return error_of(asked);
  if (code == Code::kSuccess || code == Code::kInProgress) return {};
  return error_of(code);
}

// The mutex is not held during the call, because it may last as long as the device works.
void NcclCommunicator::abort() {
  Comm* comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm != nullptr) end(comm, library_.api().comm_abort, "ncclCommAbort");
}

// The other ranks may still need this rank for data that it has sent, so NCCL is asked to finalize
// the communicator first. If the group has failed, no rank needs the data.
void NcclCommunicator::close() {
  if (comm_ == nullptr) return;
  if (interrupt_.is_raised()) return abort();
  const Code begun = library_.api().comm_finalize(comm_);
  const Status done = settle(begun, system_.deadline_in(kCloseTime), [] { return Status(); });
  if (!done.ok()) return abort();
  end(std::exchange(comm_, nullptr), library_.api().comm_destroy, "ncclCommDestroy");
}

void NcclCommunicator::end(Comm* comm, Code (*function)(Comm*),
                           std::string_view function_name) const {
  if (returns_in_time([comm, function] { static_cast<void>(function(comm)); })) return;
  if (log_ == nullptr) return;
  log_->write(LogLevel::kError, "backends",
              format("{} communicator=abandoned: {} has not returned after {} ms, because a thread "
                     "of NCCL waits for another rank or for the device; end this process",
                     name_, function_name, kMaxCallTime / std::chrono::milliseconds(1)));
}

// REQUIRES: the mutex is locked.
Error NcclCommunicator::error_of(Code code) const {
  const bool is_outside = code == Code::kSystemError || code == Code::kRemoteError;
  return Error(is_outside ? ErrorCode::kUnavailable : ErrorCode::kInternal,
               library_.describe(code, comm_));
}

}  // namespace cadre::nccl
