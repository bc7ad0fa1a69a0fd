#include "cadre/comm/monitor.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/defaults.h"
#include "cadre/comm/queue/waiter_listing.h"

namespace cadre {
namespace {

using wire::Activity;
using wire::ActivityState;

constexpr Duration kIdleLook = std::chrono::seconds(60);
constexpr std::string_view kFirstFailure = "first failure: ";

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
      last_heartbeat_(system.now()) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    peers_[i].socket = std::move(setup.control[i]);
    peers_[i].is_connected = peers_[i].socket != nullptr;
  }
  // A world of one has nobody to watch.
  const bool has_peers =
      std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.is_connected; });
  if (has_peers) thread_ = system_.spawn("cadre-monitor", [this] { run(); });
}

Monitor::~Monitor() {
  stop();
}

// ---- The operations' side ----

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

Error Monitor::error() const {
  std::lock_guard lock(mutex_);
  return error_.value_or(Error(ErrorCode::kInternal, "the group has not failed"));
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

void Monitor::publish_unless_told(const Failure& failure) {
  await([&] { return told_.has_value(); }, system_.deadline_in(kVerdictTime));
  std::unique_lock lock(mutex_);
  const Failure first = told_.value_or(failure);
  lock.unlock();
  publish(first);
}

void Monitor::publish(const Failure& failure) {
  const Activity own = own_slot().read(system_.now());
  Failure complete = failure;
  if (!complete.operation && own.state == ActivityState::kRunning) complete.operation = own;
  const Error error = compose_error(roster_, complete, own, record_path_);
  {
    std::lock_guard lock(mutex_);
    error_ = error;
    failure_phase_ = FailurePhase::kPublished;
    const std::vector<std::byte> notice = wire::encode_control(
        wire::AbortNotice{failure.code, failure.culprit, failure.cause, error.message()});
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
  log_.write(LogLevel::kError, "comm", error.message());
}

void Monitor::await_failure(int peer, Deadline deadline) {
  await(
      [&] {
        return failure_phase_ == FailurePhase::kPublished ||
               (peer >= 0 && peers_[static_cast<size_t>(peer)].left_after.has_value());
      },
      deadline);
}

// Whoever claimed the failure publishes it within kAskTime and kVerdictTime.
Error Monitor::published_failure() {
  await_failure(-1, system_.deadline_in(kAskTime + 2 * kVerdictTime));
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
  for (Peer& peer : peers_) peer.socket.reset();
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

// ---- The thread's side ----

void Monitor::run() {
  while (true) {
    flush();
    if (is_flushed()) return;
    std::vector<os::PollItem> items = interests();
    system_.poll(items, next_look(system_.now()));
    if (items[0].can_read) wake_up_->clear();
    for (size_t i = 0, at = 1; i < peers_.size(); ++i) {
      if (peers_[i].socket == nullptr) continue;
      if (items[at].can_read) receive_from(static_cast<int>(i));
      ++at;
    }
    answer_accusation();
    send_heartbeats(system_.now());
  }
}

Deadline Monitor::next_look(TimePoint now) const {
  std::lock_guard lock(mutex_);
  if (is_stopping_) return Deadline(stop_by_);
  const bool has_remote_peers =
      std::any_of(slots_.begin(), slots_.end(), [](int slot) { return slot < 0; });
  return has_remote_peers ? Deadline(last_heartbeat_ + kStatusInterval) : Deadline(now + kIdleLook);
}

// The wake-up, then every open connection in rank order.
std::vector<os::PollItem> Monitor::interests() {
  std::vector<os::PollItem> items = {{.target = wake_up_.get(), .want_read = true}};
  for (const Peer& peer : peers_) {
    if (peer.socket == nullptr) continue;
    items.push_back(
        {.target = peer.socket.get(), .want_read = true, .want_write = !peer.sending.empty()});
  }
  return items;
}

void Monitor::receive_from(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  std::array<std::byte, 4096> buffer;
  while (true) {
    const Result<size_t> received = peer.socket->try_recv(buffer);
    if (received.ok() && *received == 0) return;
    if (!received.ok()) return handle_end(rank);
    peer.splitter.append(ConstBytes(buffer).first(*received));
    while (true) {
      const auto message = peer.splitter.next();
      if (!message.ok()) return handle_end(rank);
      if (!message.value()) break;
      handle(rank, *message.value());
    }
  }
}

void Monitor::handle(int rank, const wire::ControlMessage& message) {
  if (const auto* report = std::get_if<wire::StatusReport>(&message)) handle_report(rank, *report);
  if (const auto* request = std::get_if<wire::StatusRequest>(&message)) {
    handle_request(rank, *request);
  }
  if (const auto* notice = std::get_if<wire::AbortNotice>(&message)) handle_abort(rank, *notice);
  if (const auto* goodbye = std::get_if<wire::Goodbye>(&message)) handle_goodbye(rank, *goodbye);
  if (std::holds_alternative<wire::GoodbyeReceipt>(message)) {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(rank)].has_receipt = true;
    wake_observers();
  }
}

void Monitor::handle_report(int rank, const wire::StatusReport& report) {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  Peer& peer = peers_[static_cast<size_t>(rank)];
  peer.reported = report.activity;
  peer.reported_at = now;
  peer.answered_request = std::max(peer.answered_request, report.request);
  if (report.request > 0) wake_observers();
}

void Monitor::handle_request(int rank, const wire::StatusRequest& request) {
  post(rank, wire::StatusReport{request.request, own_slot().read(system_.now())});
}

void Monitor::handle_abort(int rank, const wire::AbortNotice& notice) {
  if (notice.code == ErrorCode::kPeerLost && notice.culprit == roster_.self.value) {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(rank)].has_aborted = true;
    if (!is_leaving_) accusation_ = notice;
    return;
  }
  const bool names_a_peer = notice.culprit >= 0 && notice.culprit < roster_.world_size() &&
                            notice.culprit != roster_.self.value;
  const bool is_loss = notice.code == ErrorCode::kPeerLost && names_a_peer;
  {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(rank)].has_aborted = true;
    // What fails without a rank that is leaving is not its affair: it would tell the others, who
    // may not know yet that it leaves, of a failure of its own.
    if (is_leaving_) return;
    if (is_loss && failure_phase_ == FailurePhase::kNone) {
      peers_[static_cast<size_t>(notice.culprit)].is_gone = true;
    }
  }
  // The loss of a rank and a disagreement concern all ranks alike; all else is the sender's
  // failure, to which this rank points.
  if (is_loss || notice.code == ErrorCode::kInvalidArgument) {
    fail({notice.code, notice.culprit, notice.cause, {}});
  } else {
    // The message of a rank that heard of it, too, says which failure was the first.
    std::string cause = notice.cause;
    if (!cause.starts_with(kFirstFailure)) cause = std::string(kFirstFailure) + notice.message;
    if (cause.ends_with('.')) cause.pop_back();  // a whole message, but inside a sentence
    fail({ErrorCode::kAborted, notice.culprit, cause, {}});
  }
}

// Another rank takes this one for lost, so a connection of this rank was cut. Its own end of it
// says which: all connections have been looked at since.
void Monitor::answer_accusation() {
  if (!accusation_) return;
  if (!has_failed()) {
    fail({ErrorCode::kAborted,
          accusation_->culprit,
          std::string(kFirstFailure) + accusation_->message,
          {}});
  }
  accusation_.reset();
}

void Monitor::handle_goodbye(int rank, const wire::Goodbye& goodbye) {
  {
    std::lock_guard lock(mutex_);
    peers_[static_cast<size_t>(rank)].left_after = goodbye.number;
    wake_observers();
  }
  post(rank, wire::GoodbyeReceipt{});
  const uint64_t first = std::min(first_left_.load(std::memory_order_relaxed), goodbye.number);
  first_left_.store(first, std::memory_order_seq_cst);
  const uint64_t running = running_number_.load(std::memory_order_seq_cst);
  if (running > goodbye.number) fail_if_left_before(running);
}

void Monitor::handle_end(int rank) {
  const TimePoint now = system_.now();
  bool is_loss = false;
  PeerView view;
  {
    std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<size_t>(rank)];
    peer.is_connected = false;
    peer.outbox.clear();
    is_loss = !peer.left_after && !peer.has_aborted && !is_leaving_;
    if (is_loss) peer.is_gone = true;
    view = view_of(static_cast<size_t>(rank), now);
    wake_observers();
  }
  peers_[static_cast<size_t>(rank)].socket.reset();
  peers_[static_cast<size_t>(rank)].sending.clear();
  if (is_loss) fail({ErrorCode::kPeerLost, rank, gone_cause(roster_, rank, view), {}});
}

// Sends without the lock: in the simulator another thread may run meanwhile. A stream that does not
// take bytes any more tells why when it is read.
void Monitor::flush() {
  {
    std::lock_guard lock(mutex_);
    for (Peer& peer : peers_) {
      peer.sending.insert(peer.sending.end(), peer.outbox.begin(), peer.outbox.end());
      peer.outbox.clear();
    }
  }
  for (Peer& peer : peers_) {
    while (peer.socket != nullptr && !peer.sending.empty()) {
      const Result<size_t> sent = peer.socket->try_send(peer.sending);
      if (!sent.ok()) peer.sending.clear();
      if (!sent.ok() || *sent == 0) break;
      peer.sending.erase(peer.sending.begin(),
                         peer.sending.begin() + static_cast<ptrdiff_t>(*sent));
    }
  }
}

// Ranks that read the status page need none. One that does not take its last report gets no more.
void Monitor::send_heartbeats(TimePoint now) {
  if (now - last_heartbeat_ < kStatusInterval) return;
  last_heartbeat_ = now;
  const std::vector<std::byte> report =
      wire::encode_control(wire::StatusReport{0, own_slot().read(now)});
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    const bool takes_bytes = peer.is_connected && peer.outbox.empty() && peer.sending.empty();
    if (slots_[i] < 0 && takes_bytes) peer.outbox = report;
  }
}

bool Monitor::is_flushed() {
  const TimePoint now = system_.now();
  std::lock_guard lock(mutex_);
  if (!is_stopping_) return false;
  const bool is_empty = std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return peer.outbox.empty() && peer.sending.empty();
  });
  return is_empty || now >= stop_by_;
}

}  // namespace cadre
