#include "cadre/comm/collective_runner.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/collective/scale.h"
#include "cadre/comm/queue/thrown_error.h"

namespace cadre {
namespace {

// How long a mismatch waits for a rank that knows more of it.
constexpr Duration kSecondOpinionTime = std::chrono::milliseconds(50);

wire::Activity activity_of(const OpContext& context, Duration age) {
  wire::Activity activity;
  activity.state = wire::ActivityState::kRunning;
  activity.number = context.number;
  activity.fingerprint = context.fingerprint();
  activity.age_ns = age.count();
  return activity;
}

}  // namespace

Status CollectiveRunner::run(Operation& operation) {
  Monitor& monitor = parts_.monitor;
  if (monitor.has_failed()) return monitor.error();
  const Fingerprint fingerprint = operation.descriptor.fingerprint();
  ActivityCell& cell = monitor.own_cell().collective;
  OpProgress progress(&cell.progress);
  began_ = parts_.system.now();
  cell.begin(operation.number, fingerprint, began_);
  const uint64_t index = parts_.recorder.begin(operation.number, fingerprint, -1, began_);
  const OpContext context{operation.number,
                          {&fingerprint, 1},
                          operation.deadline.value_or(Deadline(began_ + parts_.timeout)),
                          progress};
  monitor.enter_collective(operation.number);
  Status status =
      monitor.has_failed() ? Status(monitor.error()) : execute_caught(operation, context);
  if (!status.ok() && !monitor.has_failed()) {
    status = explain(context.from(progress.index()), status.error());
  }
  if (!status.ok()) status = monitor.error();
  monitor.leave_collective();
  const TimePoint now = parts_.system.now();
  cell.end(status.ok(), now);
  parts_.recorder.end(index, {status.ok(), progress.waiting_for(), progress.phase(), now});
  time_spent_ns_.fetch_add((now - began_).count(), std::memory_order_relaxed);
  return status;
}

// An exception is this rank's own: its peers have done nothing wrong.
Status CollectiveRunner::execute_caught(Operation& operation, const OpContext& context) {
  try {
    if (operation.descriptor.kind == OpKind::kAllocate) return allocate(operation, context);
    return execute(operation.collective, context);
  } catch (const std::exception& thrown) {
    const Error error = error_of(thrown);
    return fail(context.from(context.progress.index()),
                {error.code(), parts_.monitor.roster().self.value, error.message(), {}});
  }
}

Status CollectiveRunner::execute(const Collective& collective, const OpContext& context) {
  if (collective.reduction.factor()) return execute(premultiplied(collective), context);
  if (parts_.backend != nullptr) return parts_.backend->submit(context, {&collective, 1}).status();
  const auto& [in, out] = std::pair(collective.in, collective.out);
  if (in.data() != out.data() && !out.empty()) std::memmove(out.data(), in.data(), out.size());
  return {};
}

// What is left of a PREMUL_SUM is a SUM, in place where the output has room for the whole input. To
// the peers and in messages it is still a PREMUL_SUM: its fingerprint stands in the context.
Collective CollectiveRunner::premultiplied(const Collective& collective) {
  const size_t num_bytes = collective.in.size();
  std::byte* scaled = collective.out.data();
  if (collective.out.size() != num_bytes) {
    if (scaled_.size() < num_bytes) scaled_.resize(num_bytes);
    scaled = scaled_.data();
  }
  scale(scaled, collective.in.data(), num_bytes / size_of(collective.dtype), collective.dtype,
        *collective.reduction.factor());
  Collective sum = collective;
  sum.in = {scaled, num_bytes};
  sum.reduction = ReduceOp::kSum;
  return sum;
}

Status CollectiveRunner::allocate(Operation& operation, const OpContext& context) {
  auto buffer = parts_.heap->allocate(context, operation.descriptor.count);
  if (!buffer.ok()) return buffer.error();
  operation.allocated = std::move(buffer).value();
  return {};
}

// The context is that of the collective that failed.
Error CollectiveRunner::explain(const OpContext& context, const Error& error) {
  switch (error.code()) {
    case ErrorCode::kTimeout:
      return explain_timeout(context);
    case ErrorCode::kPeerLost:
      return explain_loss(context, error);
    case ErrorCode::kAborted:
      return parts_.monitor.published_failure();
    case ErrorCode::kInvalidArgument:
      if (context.progress.mismatch_peer >= 0) return explain_mismatch(context);
      if (context.progress.part_mismatch.sender >= 0) {
        return explain_part_mismatch(context);
      }
      break;
    case ErrorCode::kUnavailable:
    case ErrorCode::kCorruption:
    case ErrorCode::kInternal:
      break;
  }
  const Rank self = parts_.monitor.roster().self;
  const int culprit = error.details().is_own_limit ? self.value : context.progress.waiting_for();
  return fail(context, {error.code(), culprit, error.message(), {}});
}

// A rank that reaches its own deadline reports its own timeout if it can name the culprit with
// certainty, even if a peer's failure arrives meanwhile.
Error CollectiveRunner::explain_timeout(const OpContext& context) {
  parts_.monitor.fail_by_timeout({.activity = activity_of(context, parts_.system.now() - began_),
                                  .number = context.number,
                                  .waiting_for = context.progress.waiting_for()});
  return parts_.monitor.published_failure();
}

Error CollectiveRunner::explain_loss(const OpContext& context, const Error& error) {
  const int peer = context.progress.waiting_for();
  const auto end = parts_.monitor.why_stream_ended(peer, error);
  if (!end) return parts_.monitor.error();
  return fail(context, {ErrorCode::kPeerLost, end->culprit, end->cause, {}});
}

// Several ranks may detect the mismatch at once, each with a different peer. So this rank polls all
// peers and reports the lowest mismatching pair. If that does not include rank 0, it first waits
// for the report of a rank whose pair does.
Error CollectiveRunner::explain_mismatch(const OpContext& context) {
  Monitor& monitor = parts_.monitor;
  const Roster& roster = monitor.roster();
  const OpProgress& progress = context.progress;
  const bool is_late = progress.own_number != 0;
  const Call own{roster.self.value, is_late ? progress.own_number : context.number,
                 is_late ? progress.own_fingerprint : context.fingerprint()};
  const Call its{progress.mismatch_peer, progress.mismatch_number, progress.mismatch_fingerprint};
  const wire::Activity activity = activity_of(context, parts_.system.now() - began_);
  monitor.fail_after([&] {
    const auto views = monitor.ask_peers(parts_.system.deadline_in(Monitor::kAskTime));
    const Mismatch mismatch = first_mismatch(views, {own, its});
    const bool is_first = std::min(mismatch.one.rank, mismatch.other.rank) == 0;
    return Monitor::Finding{{ErrorCode::kInvalidArgument, progress.mismatch_peer,
                             mismatch_cause(roster, mismatch), activity},
                            is_first ? Duration(0) : kSecondOpinionTime};
  });
  return monitor.published_failure();
}

Error CollectiveRunner::explain_part_mismatch(const OpContext& context) {
  const OpProgress::PartMismatch& parts = context.progress.part_mismatch;
  const std::string cause = part_mismatch_cause(
      parts_.monitor.roster(), parts, OpDescriptor::from_fingerprint(context.fingerprint()).dtype);
  return fail(context, {ErrorCode::kInvalidArgument, parts.sender, cause, {}});
}

Error CollectiveRunner::fail(const OpContext& context, Failure failure) {
  failure.operation = activity_of(context, parts_.system.now() - began_);
  parts_.monitor.fail(failure);
  return parts_.monitor.published_failure();
}

}  // namespace cadre
