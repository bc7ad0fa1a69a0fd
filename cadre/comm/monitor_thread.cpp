// The monitor's thread: what it sends and receives on the control connections.
#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "cadre/comm/defaults.h"
#include "cadre/comm/monitor.h"

namespace cadre {
namespace {

constexpr Duration kIdleLook = std::chrono::seconds(60);
constexpr std::string_view kFirstFailure = "first failure: ";

}  // namespace

void Monitor::run() {
  while (true) {
    flush();
    if (is_flushed()) return;
    std::vector<os::PollItem> items = interests();
    system_.poll(items, next_look(system_.now()));
    if (items[0].can_read) wake_up_->clear();
    const TimePoint now = system_.now();
    for (size_t i = 0, at = 1; i < peers_.size(); ++i) {
      if (peers_[i].socket == nullptr) continue;
      if (items[at++].can_read) receive_from(static_cast<int>(i));
      if (peers_[i].process == nullptr) continue;
      if (items[at++].can_read) {
        peers_[i].ended_at = now;
        peers_[i].process.reset();
      }
    }
    bury_ended(now);
    judge_silence(now);
    answer_accusation();
    send_heartbeats(system_.now());
  }
}

Deadline Monitor::next_look(TimePoint now) const {
  std::lock_guard lock(mutex_);
  if (is_stopping_) return Deadline(stop_by_);
  const bool has_remote_peers =
      std::any_of(slots_.begin(), slots_.end(), [](int slot) { return slot < 0; });
  Deadline look =
      has_remote_peers ? Deadline(last_heartbeat_ + kStatusInterval) : Deadline(now + kIdleLook);
  for (const Peer& peer : peers_) {
    const bool is_awaited = peer.ended_at && peer.socket != nullptr;
    if (is_awaited) look = look.earlier(Deadline(*peer.ended_at + kLastWordsTime));
  }
  return look;
}

// The wake-up, then every open connection in rank order, each with the process behind it.
std::vector<os::PollItem> Monitor::interests() {
  std::vector<os::PollItem> items = {{.target = wake_up_.get(), .want_read = true}};
  for (const Peer& peer : peers_) {
    if (peer.socket == nullptr) continue;
    items.push_back(
        {.target = peer.socket.get(), .want_read = true, .want_write = !peer.sending.empty()});
    if (peer.process != nullptr) {
      items.push_back({.target = peer.process.get(), .want_read = true});
    }
  }
  return items;
}

void Monitor::receive_from(int rank) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  std::array<std::byte, 4096> buffer;
  while (true) {
    const Result<size_t> received = peer.socket->try_recv(buffer);
    if (received.ok() && *received == 0) return;
    if (!received.ok()) return handle_end(rank, SignOfLoss::kConnectionEnded);
    peer.silent_for = Duration(0);
    peer.splitter.append(ConstBytes(buffer).first(*received));
    while (true) {
      const auto message = peer.splitter.next();
      if (!message.ok()) return handle_end(rank, SignOfLoss::kConnectionEnded);
      if (!message.value()) break;
      handle(rank, *message.value());
    }
  }
}

// A connection that is still open after its process has ended, and after the last bytes have come,
// is held by a child which that process forked.
void Monitor::bury_ended(TimePoint now) {
  for (size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    if (!peer.ended_at || peer.socket == nullptr) continue;
    if (now - *peer.ended_at >= kLastWordsTime) {
      handle_end(static_cast<int>(i), SignOfLoss::kProcessEnded);
    }
  }
}

// Counts only while this thread looks: after a stop of this process, or of all, the peers have as
// long to speak as before it. Peers that read the status page send no heartbeats.
void Monitor::judge_silence(TimePoint now) {
  const Duration since = std::min<Duration>(now - silence_judged_at_, 2 * kStatusInterval);
  silence_judged_at_ = now;
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (slots_[i] >= 0 || peer.socket == nullptr) continue;
    peer.silent_for += since;
    if (peer.silent_for >= silence_limit_) {
      handle_end(static_cast<int>(i), SignOfLoss::kSilence);
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
    fail({notice.code, notice.culprit, notice.cause, {}, notice.reporter});
  } else {
    // The message of a rank that heard of it, too, says which failure was the first.
    std::string cause = notice.cause;
    if (!cause.starts_with(kFirstFailure)) cause = std::string(kFirstFailure) + notice.message;
    if (cause.ends_with('.')) cause.pop_back();  // a whole message, but inside a sentence
    fail({ErrorCode::kAborted, notice.culprit, cause, {}, notice.reporter});
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
          {},
          accusation_->reporter});
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

void Monitor::handle_end(int rank, SignOfLoss sign) {
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
  if (is_loss) fail({ErrorCode::kPeerLost, rank, gone_cause(roster_, rank, view, sign), {}});
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
