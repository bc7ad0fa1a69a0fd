#include "cadre/comm/monitor.h"

#include <algorithm>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/queue/waiter_listing.h"

namespace cadre {
namespace {

using wire::Activity;
using wire::ActivityState;

}  // namespace

Monitor::Monitor(os::System& system, os::Interrupt& interrupt, MonitorSetup setup)
    : system_(system),
      interrupt_(interrupt),
      roster_(std::move(setup.roster)),
      page_(std::move(setup.page)),
      slots_(std::move(setup.slots)),
      own_slot_index_(std::max(slots_[static_cast<size_t>(roster_.self.value)], 0)),
      record_path_(std::move(setup.record_path)),
      log_(setup.log),
      wake_up_(system.make_event()),
      peers_(setup.control.size()),
      silence_limit_(setup.silence_limit),
      last_heartbeat_(system.now()),
      silence_judged_at_(last_heartbeat_) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    peers_[i].socket = std::move(setup.control[i]);
    peers_[i].is_connected = peers_[i].socket != nullptr;
    if (i < setup.processes.size()) peers_[i].process = std::move(setup.processes[i]);
  }
  // A world of one has nobody to watch.
  const bool has_peers =
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.is_connected; });
  if (has_peers) thread_ = system_.spawn("cadre-monitor", [this] { run(); });
}

Monitor::~Monitor() {
  stop();
}

// The goodbye of a peer and the start of a collective may cross: each side first writes its own
// word, then reads the other's, both in the one order of sequential consistency, so that at least
// one of them sees the other.
void Monitor::enter_collective(uint64_t number) {
  running_number_.store(number, std::memory_order_seq_cst);
  if (first_left_.load(std::memory_order_seq_cst) < number) fail_if_left_before(number);
}

void Monitor::leave_collective() {
  running_number_.store(0, std::memory_order_release);
}

void Monitor::fail_if_left_before(uint64_t number) {
  int peer = -1;
  uint64_t left_after = 0;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < peers_.size(); ++i) {
      const auto& left = peers_[i].left_after;
      if (left && *left < number && (peer < 0 || *left < left_after)) {
        peer = static_cast<int>(i);
        left_after = *left;
      }
    }
  }
  if (peer < 0) return;
  fail({ErrorCode::kPeerLost, peer, left_cause(roster_, peer, left_after), {}});
}

Error Monitor::error() {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  settle_blame(now);
  return error_.value_or(Error(ErrorCode::kInternal, "the group has not failed"));
}

// News may come while a rank is on its way out of a collective, which then ends well: the next one
// fails, or none has begun. Messages are numbered apart and are left alone.
void Monitor::settle_blame(TimePoint now) {
  if (!is_blame_open_) return;
  const Activity last = own_slot().collective.read(now);
  const bool is_over =
      last.number != failure_.operation->number || last.state == ActivityState::kDone;
  if (!is_over) return;
  is_blame_open_ = false;
  failure_.operation.reset();
  if (last.state == ActivityState::kRunning) failure_.operation = last;
  error_ = compose_error(roster_, failure_, last, record_path_);
}

bool Monitor::claim_failure() {
  std::lock_guard lock(mutex_);
  if (failure_phase_ != FailurePhase::kNone) return false;
  failure_phase_ = FailurePhase::kClaimed;
  return true;
}

void Monitor::fail(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    if (failure_phase_ == FailurePhase::kClaimed && !told_) {
      told_ = failure;
      wake_observers();
    }
  }
  if (claim_failure()) publish(failure);
}

void Monitor::publish_unless_told(const Failure& failure, Duration patience) {
  await([&] { return told_.has_value(); }, system_.deadline_in(patience));
  std::unique_lock lock(mutex_);
  const Failure first = told_.value_or(failure);
  lock.unlock();
  publish(first);
}

void Monitor::publish(const Failure& failure) {
  const Activity own = own_slot().read(system_.now());
  Failure complete = failure;
  if (!complete.operation && own.state == ActivityState::kRunning) complete.operation = own;
  const bool is_open = !failure.operation && complete.operation && !is_message(own.fingerprint);
  const Error error = compose_error(roster_, complete, own, record_path_);
  const Error told = is_open ? compose_error(roster_, failure, own, record_path_) : error;
  {
    std::lock_guard lock(mutex_);
    failure_ = complete;
    is_blame_open_ = is_open;
    error_ = error;
    failure_phase_ = FailurePhase::kPublished;
    const int reporter = failure.reporter < 0 ? roster_.self.value : failure.reporter;
    const std::vector<std::byte> notice = wire::encode_control(
        wire::AbortNotice{failure.code, failure.culprit, reporter, failure.cause,
                          compose_sentence(roster_, is_open ? failure : complete, own)});
    for (Peer& peer : peers_) {
      if (peer.is_connected) peer.outbox.insert(peer.outbox.end(), notice.begin(), notice.end());
    }
    // Before an observer can throw the error and close() asks whether the group has failed: a rank
    // that says goodbye then would be taken for one that left.
    has_failed_.store(true, std::memory_order_release);
    wake_observers();
  }
  interrupt_.raise();
  wake_up_->notify();
  if (failure.is_logged) log_.write(LogLevel::kError, "comm", told.message());
}

void Monitor::await_failure(int peer, Deadline deadline) {
  await(
      [&] {
        return failure_phase_ == FailurePhase::kPublished ||
               (peer >= 0 && peers_[static_cast<size_t>(peer)].left_after.has_value());
      },
      deadline);
}

// Whoever claimed the failure publishes it within kAskTime and kDoubtTime.
Error Monitor::published_failure() {
  await_failure(-1, system_.deadline_in(kAskTime + 2 * kDoubtTime));
  if (has_failed()) return error();
  fail({ErrorCode::kInternal, -1, "an operation was interrupted without a reason", {}});
  await_failure(-1, system_.deadline_in(kAskTime));
  return error();
}

std::optional<std::string> Monitor::why_stream_ended(int peer, const Error& error) {
  await_failure(peer, system_.deadline_in(kVerdictTime));
  if (has_failed()) return std::nullopt;
  if (peer < 0) return error.message();
  const PeerView view = peers()[static_cast<size_t>(peer)];
  if (view.left_after) return left_cause(roster_, peer, *view.left_after);
  return format("the connection to {} broke: {}", roster_.describe(peer), error.message());
}

std::vector<PeerView> Monitor::peers() const {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  std::vector<PeerView> views;
  for (size_t i = 0; i < peers_.size(); ++i) views.push_back(view_of(i, now));
  return views;
}

PeerView Monitor::view_of(size_t rank, TimePoint now) const {
  const Peer& peer = peers_[rank];
  PeerView view;
  view.is_gone = peer.is_gone;
  view.has_aborted = peer.has_aborted;
  view.left_after = peer.left_after;
  view.answers = num_requests_ > 0 && peer.answered_request == num_requests_;
  if (slots_[rank] >= 0) {
    view.activity = page_.slot(slots_[rank]).read(now);
  } else if (peer.reported) {
    view.activity = *peer.reported;
    view.activity.age_ns += (now - peer.reported_at).count();
  }
  return view;
}

std::vector<PeerView> Monitor::ask_peers(Deadline deadline) {
  uint64_t request = 0;
  {
    std::lock_guard lock(mutex_);
    request = ++num_requests_;
  }
  post_to_all(wire::StatusRequest{request});
  await(
      [&] {
        return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
          return !peer.is_connected || peer.answered_request >= request;
        });
      },
      deadline);
  return peers();
}

void Monitor::say_goodbye(uint64_t number, Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    is_leaving_ = true;
  }
  post_to_all(wire::Goodbye{number});
  await(
      [&] {
        return failure_phase_ == FailurePhase::kPublished ||
               std::all_of(peers_.begin(), peers_.end(),
                           [](const Peer& peer) { return !peer.is_connected || peer.has_receipt; });
      },
      deadline);
}

void Monitor::stop() {
  {
    std::lock_guard lock(mutex_);
    if (!is_stopping_) stop_by_ = system_.now() + kFlushTime;
    is_stopping_ = true;
    is_leaving_ = true;
  }
  wake_up_->notify();
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
  for (Peer& peer : peers_) {
    peer.socket.reset();
    peer.process.reset();
  }
}

bool Monitor::await(const std::function<bool()>& is_met, Deadline deadline) {
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  const WaiterListing listing(mutex_, observers_, *waiter);
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (is_met()) return true;
    }
    if (deadline.has_passed(system_.now())) return false;
    waiter->park(deadline);
  }
}

void Monitor::wake_observers() {
  for (os::Waiter* observer : observers_) observer->unpark();
}

void Monitor::post(int rank, const wire::ControlMessage& message) {
  const std::vector<std::byte> frame = wire::encode_control(message);
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.is_connected) peer.outbox.insert(peer.outbox.end(), frame.begin(), frame.end());
}

void Monitor::post_to_all(const wire::ControlMessage& message) {
  for (size_t i = 0; i < peers_.size(); ++i) post(static_cast<int>(i), message);
  wake_up_->notify();
}

}  // namespace cadre
