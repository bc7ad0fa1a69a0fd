#include "cadre/core/comm/messages/message_queue.h"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/queue/thrown_error.h"

namespace cadre {
namespace {

// The maximum sleep of a thread that waits. Every event that concerns it wakes it earlier.
constexpr Duration kSleep = std::chrono::seconds(60);
// The sleeps while a send waits for its gate, which wakes no thread. They double from the first to
// the last: short work of a device is seen soon, and a long wait costs little.
constexpr Duration kFirstNap = std::chrono::microseconds(20);
constexpr Duration kLastNap = std::chrono::milliseconds(1);

Fingerprint fingerprint_of(const Message& message) {
  return OpDescriptor{.kind = message.kind,
                      .dtype = message.dtype,
                      .root = std::max(message.peer.value, 0),
                      .count = message.num_bytes() / size_of(message.dtype)}
      .fingerprint();
}

const char* phase_of(const Message& message) {
  return message.kind == OpKind::kSend ? "send" : "receive";
}

}  // namespace

class MessageQueue::Pending final : public Message, public IssuedOperation {
 public:
  Pending(std::shared_ptr<ProgressQueue> queue, const MessageCall& call,
          const MessageSpace& message_space, CollectiveOptions options, SendGate is_written_in)
      : Message{call, options.deadline, message_space, std::move(is_written_in)},
        IssuedOperation(std::move(queue), std::move(options.keep_alive), options.call) {}
  OpKind first_kind() const override { return kind; }

  TimePoint began;                       // only the holder of the progress role uses it
  std::optional<uint64_t> record_index;  // only the holder uses it; nullopt before the start
};

MessageQueue::MessageQueue(const Parts& parts)
    : ProgressQueue(parts.system, "cadre-messages", parts.fork_guard, parts.log),
      parts_(parts),
      protocol_(parts.transport,
                [monitor = &parts.monitor](int rank) { return monitor->roster().describe(rank); }) {
}

Rank MessageQueue::run(const MessageCall& call, const MessageSpace& space,
                       CollectiveOptions options, SendGate is_written) {
  if (parts_.monitor.has_failed()) throw parts_.monitor.error();
  const auto pending = std::make_shared<Pending>(shared_from_this(), call, space,
                                                 std::move(options), std::move(is_written));
  post(std::array<Handle, 1>{pending}, MovedBy::kCaller);
  pending->wait(std::nullopt);
  return pending->peer;
}

std::vector<Work> MessageQueue::issue(std::span<const MessageCall> calls, const MessageSpace& space,
                                      const CollectiveOptions& options,
                                      const SendGate& is_written) {
  if (parts_.monitor.has_failed()) throw parts_.monitor.error();
  std::vector<Handle> posted;
  std::vector<Work> works;
  for (const MessageCall& call : calls) {
    const SendGate gate = call.kind == OpKind::kSend ? is_written : SendGate();
    posted.push_back(std::make_shared<Pending>(shared_from_this(), call, space, options, gate));
    works.emplace_back(posted.back());
  }
  if (!posted.empty()) post(posted, MovedBy::kThread);
  return works;
}

// The number of bytes that were sent and received on the streams is unknown after an exception, so
// all messages end with the failure of the group.
void MessageQueue::advance(const IssuedOperation* until) {
  try {
    move_messages(until);
  } catch (const std::exception& thrown) {
    fail(error_of(thrown));
    end_all(parts_.monitor.published_failure());
  }
}

void MessageQueue::fail(const Error& error) {
  Monitor& monitor = parts_.monitor;
  monitor.fail({error.code(), monitor.roster().self.value, error.message(), {}});
}

void MessageQueue::end_moving(const Error& error) {
  protocol_.abandon(error);
  while (const PointToPoint::Ended* ended = protocol_.first_ended()) {
    finish(static_cast<Pending&>(*ended->message), ended->status);
    protocol_.drop_first_ended();
  }
}

void MessageQueue::move_messages(const IssuedOperation* until) {
  Duration nap = kFirstNap;
  while (!is_over(until)) {
    start_posted();
    // No byte may move once the group has failed, because callers may have freed the memory of
    // their messages.
    if (parts_.monitor.has_failed()) {
      protocol_.abandon(parts_.monitor.error());
    } else {
      protocol_.advance(parts_.system.now());
    }
    while (const PointToPoint::Ended* ended = protocol_.first_ended()) {
      Pending& pending = static_cast<Pending&>(*ended->message);
      const Status& status = ended->status;
      finish(pending, status.ok() ? status : explain(pending, status.error()));
      protocol_.drop_first_ended();
    }
    if (parts_.monitor.has_failed() || is_over(until)) continue;
    const bool polls = protocol_.has_unwritten();
    const Status status = protocol_.wait(parts_.system.deadline_in(polls ? nap : kSleep));
    nap = polls ? std::min(nap * 2, kLastNap) : kFirstNap;
    if (status.ok()) continue;
    if (status.error().code() != ErrorCode::kAborted) fail(status.error());
    static_cast<void>(parts_.monitor.published_failure());
  }
}

// A message is removed from the queue only after the protocol (PointToPoint) has stored it. So no
// exception can lose a message.
void MessageQueue::start_posted() {
  while (const Handle oldest = begin_oldest()) {
    const auto pending = std::static_pointer_cast<Pending>(oldest);
    pending->began = parts_.system.now();
    if (!pending->deadline) pending->deadline = Deadline(pending->began + parts_.timeout);
    if (protocol_.oldest() == nullptr) show(*pending);
    pending->record_index = parts_.recorder.begin(pending->number(), fingerprint_of(*pending),
                                                  pending->peer.value, pending->began);
    protocol_.post(pending);
    start_moving(*pending);
  }
}

void MessageQueue::show(const Pending& pending) {
  ActivityCell& cell = parts_.monitor.own_cell().message;
  OpProgress progress(&cell.progress);
  progress.set_phase(phase_of(pending));
  progress.set_waiting_for(pending.peer.value);
  cell.begin(pending.number(), fingerprint_of(pending), pending.began);
}

// Ends a message, at most once: after an exception a message may be in two lists.
void MessageQueue::finish(Pending& pending, Status status) {
  if (pending.is_completed()) return;
  const TimePoint now = parts_.system.now();
  if (pending.record_index) {
    parts_.recorder.end(*pending.record_index, {status.ok(), status.ok() ? -1 : pending.peer.value,
                                                phase_of(pending), now});
  }
  ActivityCell& cell = parts_.monitor.own_cell().message;
  // If there are several messages, the cell of the status page shows the oldest, which is most
  // likely to be blocked.
  if (cell.number.load(std::memory_order_relaxed) == pending.number()) {
    const PointToPoint::Handle oldest = protocol_.oldest();
    cell.end(status.ok(), now);
    if (status.ok() && oldest != nullptr) show(static_cast<const Pending&>(*oldest));
  }
  end(pending, std::move(status));
}

Error MessageQueue::explain(const Pending& pending, const Error& error) {
  if (parts_.monitor.has_failed()) return parts_.monitor.error();
  // While this rank looks for the culprit, others do so too, and must see which message has failed.
  // The protocol no longer counts it among those that are pending.
  if (!parts_.monitor.own_cell().message.is_running()) show(pending);
  wire::Activity activity;
  activity.state = wire::ActivityState::kRunning;
  activity.number = pending.number();
  activity.fingerprint = fingerprint_of(pending);
  activity.age_ns = (parts_.system.now() - pending.began).count();
  if (error.code() == ErrorCode::kTimeout && protocol_.is_unwritten(pending)) {
    explain_unwritten(pending, activity);
  } else if (error.code() == ErrorCode::kTimeout) {
    parts_.monitor.fail_by_timeout(
        {.activity = activity, .waiting_for = pending.peer.value, .where = where_of(pending)});
  } else if (error.code() == ErrorCode::kPeerLost) {
    explain_loss(pending, activity, error);
  } else if (error.code() != ErrorCode::kAborted) {
    const bool is_own = error.details().is_own_limit;
    const bool is_invalid = error.code() == ErrorCode::kInvalidArgument;
    parts_.monitor.fail(
        {.code = error.code(),
         .culprit = is_own ? parts_.monitor.roster().self.value : pending.peer.value,
         .cause = format("{}: {}", pending.space.describe(pending.tag), error.message()),
         .operation = activity,
         .remedy = std::string(!is_invalid ? ""
                               : is_own    ? kCloseOnlyOwn
                                           : kMatchingMessages)});
  }
  return parts_.monitor.published_failure();
}

// Returns the tag for messages of errors. If a recv waits and a message with another tag has
// arrived, adds that tag: one of the two tags is probably wrong.
std::string MessageQueue::where_of(const Pending& pending) const {
  const auto arrived = pending.kind == OpKind::kRecv
                           ? protocol_.first_unexpected(pending.peer, pending.space)
                           : std::nullopt;
  const std::string tag = pending.space.describe(pending.tag);
  if (!arrived) return tag;
  return format("{} (a message with tag {} from rank {} has arrived, which no recv takes)", tag,
                arrived->tag, arrived->source);
}

// The peer is not at fault: it cannot receive what has not left this rank's device.
void MessageQueue::explain_unwritten(const Pending& pending, const wire::Activity& activity) {
  Monitor& monitor = parts_.monitor;
  const Rank self = monitor.roster().self;
  monitor.fail(
      {.code = ErrorCode::kTimeout,
       .culprit = self.value,
       .cause = format("{}: the device of {} has not copied the message to the host",
                       pending.space.describe(pending.tag), monitor.roster().describe(self.value)),
       .operation = activity,
       .remedy = "look for what the device works on or waits for; then restart the job or call "
                 "rejoin()"});
}

void MessageQueue::explain_loss(const Pending& pending, const wire::Activity& activity,
                                const Error& error) {
  const int peer = pending.peer.value;
  const auto end = parts_.monitor.why_stream_ended(peer, error);
  if (!end) return;
  parts_.monitor.fail({ErrorCode::kPeerLost, end->culprit,
                       format("{}: {}", pending.space.describe(pending.tag), end->cause),
                       activity});
}

}  // namespace cadre
