#include "cadre/comm/messages/message_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/collective/op.h"
#include "cadre/comm/queue/completion.h"
#include "cadre/comm/queue/thrown_error.h"
#include "cadre/comm/queue/waiter_listing.h"

namespace cadre {
namespace {

// An upper bound for a sleep: every change wakes the sleeper.
constexpr Duration kSleep = std::chrono::seconds(60);

Fingerprint fingerprint_of(const Message& message) {
  return OpDescriptor{.kind = message.kind,
                      .dtype = message.dtype,
                      .root = std::max(message.peer.value, 0),
                      .count = message.num_bytes() / size_of(message.dtype)}
      .fingerprint();
}

Error closed_error() {
  return Error(ErrorCode::kAborted, "the group is closed");
}

const char* phase_of(const Message& message) {
  return message.kind == OpKind::kSend ? "send" : "receive";
}

}  // namespace

class MessageQueue::Pending final : public Message, public IssuedState {
 public:
  Pending(std::shared_ptr<MessageQueue> queue, Message message)
      : Message(std::move(message)), queue_(std::move(queue)) {}

  void wait(std::optional<Deadline> until) override {
    queue_->parts_.fork_guard->check();
    if (!is_completed()) queue_->wait_for(*this, until);
    rethrow();
  }
  // Not under the queue's lock, and before complete(): as in operation_queue.cpp.
  void release_owner() { keep_alive.reset(); }
  void complete(Status status) { complete_with(std::move(status)); }

  TimePoint began;                       // the role's
  std::optional<uint64_t> record_index;  // the role's; none before it was started

 private:
  const std::shared_ptr<MessageQueue> queue_;
};

MessageQueue::MessageQueue(const Parts& parts)
    : parts_(parts), protocol_(parts.transport), thread_(parts.system, "cadre-messages") {}
MessageQueue::~MessageQueue() = default;

Rank MessageQueue::run(Message message) {
  const std::shared_ptr<Pending> pending = post(std::move(message), false);
  pending->wait(std::nullopt);
  return pending->peer;
}

Work MessageQueue::issue(Message message) {
  return Work(post(std::move(message), true));
}

std::shared_ptr<MessageQueue::Pending> MessageQueue::post(Message message, bool needs_thread) {
  if (parts_.monitor.has_failed()) throw parts_.monitor.error();
  if (!message.deadline) message.deadline = parts_.system.deadline_in(parts_.timeout);
  auto pending = std::make_shared<Pending>(shared_from_this(), std::move(message));
  std::unique_ptr<os::Thread> ended;
  {
    std::lock_guard lock(mutex_);
    if (refusal_) throw *refusal_;
    if (needs_thread) ended = start_thread(pending->kind);
    posted_.push_back(pending);
    pending->number = ++num_issued_;
    ++num_pending_;
    if (is_role_taken_) {
      parts_.transport.wake();
    } else if (needs_thread) {
      thread_.unpark();
    }
  }
  if (ended != nullptr) ended->join();
  return pending;
}

// Under the lock, so that close() finds either no thread or one to join.
std::unique_ptr<os::Thread> MessageQueue::start_thread(OpKind first) {
  try {
    return thread_.start([this] { run_thread(); });
  } catch (const Error& error) {
    throw error.with_context(format("{} was not issued", first));
  }
}

bool MessageQueue::is_idle() const {
  std::lock_guard lock(mutex_);
  return num_pending_ == 0 && !is_role_taken_;
}

bool MessageQueue::has_pending() const {
  std::lock_guard lock(mutex_);
  return num_pending_ > 0;
}

void MessageQueue::refuse(const Error& reason) {
  std::lock_guard lock(mutex_);
  if (!refusal_) refusal_ = reason;
}

bool MessageQueue::try_take_role() {
  if (is_role_taken_ || num_pending_ == 0) return false;
  is_role_taken_ = true;
  return true;
}

// If messages are pending, another thread must take the role; not every waiting caller may. After a
// close() that is not needed: the holder ends the messages. A message that has ended keeps this
// queue alive as well, as long as the protocol refers to it.
void MessageQueue::release_role() {
  std::unique_lock lock(mutex_);
  if (is_stopping_) {
    lock.unlock();
    end_all(closed_error());
    lock.lock();
  }
  is_role_taken_ = false;
  for (os::Waiter* waiter : waiting_) waiter->unpark();
  if (num_pending_ > 0) thread_.unpark();
}

// A caller with a deadline of its own does not take the role: it could not leave it half-way.
void MessageQueue::wait_for(const Pending& pending, std::optional<Deadline> deadline) {
  const std::unique_ptr<os::Waiter> waiter = parts_.system.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!pending.is_completed()) {
    bool has_role = false;
    if (!deadline) {
      std::lock_guard lock(mutex_);
      has_role = try_take_role();
    }
    if (has_role) {
      const HeldRole role(*this);
      progress(&pending);
      break;
    }
    waiter->park(deadline.value_or(parts_.system.deadline_in(kSleep)));
    if (deadline && deadline->has_passed(parts_.system.now())) break;
  }
  if (pending.is_completed()) return;
  throw Error(ErrorCode::kTimeout,
              format("waited for {} #{} until the deadline of the wait; the operation goes on",
                     pending.kind, pending.number));
}

void MessageQueue::run_thread() {
  bool was_idle = false;
  while (true) {
    bool has_role = false;
    {
      std::lock_guard lock(mutex_);
      if (is_stopping_ || (was_idle && num_pending_ == 0)) return thread_.note_end();
      has_role = try_take_role();
    }
    if (has_role) {
      was_idle = false;
      const HeldRole role(*this);
      progress(nullptr);
    } else {
      was_idle = !thread_.park();
    }
  }
}

void MessageQueue::progress(const Pending* until) {
  try {
    move_messages(until);
  } catch (const std::exception& thrown) {
    give_up(error_of(thrown));
  }
}

// Ends all messages with the failure of the group: after an exception it is not known how far the
// streams came.
void MessageQueue::give_up(const Error& error) {
  Monitor& monitor = parts_.monitor;
  monitor.fail({error.code(), monitor.roster().self.value, error.message(), {}});
  const Error failure = monitor.published_failure();
  end_all(failure);
}

void MessageQueue::end_all(const Error& error) {
  protocol_.abandon(error);
  while (const PointToPoint::Ended* ended = protocol_.first_ended()) {
    finish(static_cast<Pending&>(*ended->message), ended->status);
    protocol_.drop_first_ended();
  }
  std::deque<std::shared_ptr<Pending>> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (const auto& pending : posted) finish(*pending, error);
}

void MessageQueue::move_messages(const Pending* until) {
  const auto is_over = [&] {
    if (is_stopping_) return true;
    if (until != nullptr) return until->is_completed();
    std::lock_guard lock(mutex_);
    return num_pending_ == 0;
  };
  while (!is_over()) {
    start_posted();
    // After a failure no byte may move: whose memory it is has been given back.
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
    if (parts_.monitor.has_failed() || is_over()) continue;
    const Status status = protocol_.wait(parts_.system.deadline_in(kSleep));
    if (status.ok()) continue;
    if (status.error().code() != ErrorCode::kAborted) {
      const int self = parts_.monitor.roster().self.value;
      parts_.monitor.fail({status.error().code(), self, status.error().message(), {}});
    }
    static_cast<void>(parts_.monitor.published_failure());
  }
}

void MessageQueue::start_posted() {
  while (true) {
    std::shared_ptr<Pending> pending;
    {
      std::lock_guard lock(mutex_);
      if (posted_.empty()) return;
      pending = posted_.front();
    }
    pending->began = parts_.system.now();
    if (protocol_.oldest() == nullptr) show(*pending);
    pending->record_index = parts_.recorder.begin(pending->number, fingerprint_of(*pending),
                                                  pending->peer.value, pending->began);
    protocol_.post(pending);
    // Only now: until the protocol has it, an exception must find it here.
    std::lock_guard lock(mutex_);
    posted_.pop_front();
  }
}

void MessageQueue::show(const Pending& pending) {
  ActivityCell& cell = parts_.monitor.own_cell().message;
  OpProgress progress(&cell.progress);
  progress.set_phase(phase_of(pending));
  progress.set_waiting_for(pending.peer.value);
  cell.begin(pending.number, fingerprint_of(pending), pending.began);
}

// Once for each message: an exception may leave one in two lists.
void MessageQueue::finish(Pending& pending, Status status) {
  if (pending.is_completed()) return;
  const TimePoint now = parts_.system.now();
  if (pending.record_index) {
    parts_.recorder.end(*pending.record_index, {status.ok(), status.ok() ? -1 : pending.peer.value,
                                                phase_of(pending), now});
  }
  ActivityCell& cell = parts_.monitor.own_cell().message;
  // Of several at once the cell shows the oldest, which is the likeliest to be held up.
  if (cell.number.load(std::memory_order_relaxed) == pending.number) {
    const PointToPoint::Handle oldest = protocol_.oldest();
    cell.end(status.ok(), now);
    if (status.ok() && oldest != nullptr) show(static_cast<const Pending&>(*oldest));
  }
  pending.release_owner();
  std::lock_guard lock(mutex_);
  pending.complete(std::move(status));
  --num_pending_;
  for (os::Waiter* waiter : waiting_) waiter->unpark();
}

Error MessageQueue::explain(const Pending& pending, const Error& error) {
  if (parts_.monitor.has_failed()) return parts_.monitor.error();
  wire::Activity activity;
  activity.state = wire::ActivityState::kRunning;
  activity.number = pending.number;
  activity.fingerprint = fingerprint_of(pending);
  activity.age_ns = (parts_.system.now() - pending.began).count();
  if (error.code() == ErrorCode::kTimeout) {
    parts_.monitor.fail_by_timeout({.activity = activity,
                                    .waiting_for = pending.peer.value,
                                    .where = format("tag {}", pending.tag)});
  } else if (error.code() == ErrorCode::kPeerLost) {
    explain_loss(pending, activity, error);
  } else if (error.code() != ErrorCode::kAborted) {
    parts_.monitor.fail({error.code(), pending.peer.value,
                         format("tag {}: {}", pending.tag, error.message()), activity});
  }
  return parts_.monitor.published_failure();
}

void MessageQueue::explain_loss(const Pending& pending, const wire::Activity& activity,
                                const Error& error) {
  const int peer = pending.peer.value;
  const auto end = parts_.monitor.why_stream_ended(peer, error);
  if (!end) return;
  parts_.monitor.fail({ErrorCode::kPeerLost, end->culprit,
                       format("tag {}: {}", pending.tag, end->cause), activity});
}

bool MessageQueue::drain(Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = parts_.system.make_waiter();
  const WaiterListing listing(mutex_, waiting_, *waiter);
  while (!is_idle()) {
    if (deadline.has_passed(parts_.system.now())) return false;
    waiter->park(deadline);
  }
  return true;
}

void MessageQueue::close() {
  std::unique_ptr<os::Thread> thread;
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    if (!refusal_) refusal_ = closed_error();
    thread_.unpark();
    thread = thread_.take();
  }
  if (thread != nullptr) thread->join();
  {
    std::lock_guard lock(mutex_);
    if (is_role_taken_) {
      // A waiting caller moves messages, or ends one: it ends what is left, too.
      parts_.transport.wake();
      return;
    }
    is_role_taken_ = true;
  }
  // Each message keeps this queue, so none may stay.
  const HeldRole role(*this);
}

}  // namespace cadre
