#include "cadre/core/transport/tcp/stream_transport.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/transport/wait_error.h"

namespace cadre {
namespace {

// The number of polls before wait() sleeps. A poll costs about 0.5 us and waking up from sleep 10
// to 25 us, so polling for about 50 us costs at most a few times what it can save. Ranks that share
// a core poll less often and yield between two polls.
constexpr int kLooks = 100;
constexpr int kLooksWhenCrowded = 10;

constexpr Deadline kAtOnce{TimePoint{0}};
// The time limit of connecting for an optional interest: a peer that does not answer must not delay
// the operation with the other peers.
constexpr Duration kOptionalDialTime = std::chrono::milliseconds(200);

}  // namespace

StreamTransport::StreamTransport(std::shared_ptr<TcpLinks> links, StreamTransportOptions options,
                                 os::Interrupt& interrupt)
    : links_(std::move(links)), options_(std::move(options)), interrupt_(interrupt) {
  channels_.resize(options_.members.size());
  const bool is_crowded = links_->options_.is_crowded;
  num_looks_ = links_->system_.spin_limit() == 0 ? 0 : is_crowded ? kLooksWhenCrowded : kLooks;
}

StreamTransport::~StreamTransport() {
  try {
    links_->close(options_.id, options_.members);
  } catch (...) {
    // Only the simulator throws here, to unwind the thread of a rank that it kills. A destructor
    // must not throw; the simulator throws again at the thread's next call of its System.
  }
}

StreamTransport::StreamChannel& StreamTransport::stream_channel(Rank peer) {
  auto& channel = channels_[static_cast<size_t>(peer.value)];
  if (channel == nullptr) channel = std::make_unique<StreamChannel>(*this, peer);
  return *channel;
}

void StreamTransport::wake() {
  is_woken_.store(true, std::memory_order_release);
  spot_.notify();
}

Status StreamTransport::wait(std::span<const ChannelInterest> interests, Deadline deadline) {
  os::System& system = links_->system_;
  std::optional<Sleep> sleep;
  std::optional<PeerLink::Look> prepared;
  for (int look = 0;; ++look) {
    if (look == num_looks_) {
      auto lease = links_->events_.take();
      if (!lease.ok()) return lease.error();
      sleep.emplace(*this, std::move(lease).value());
      // A notification that came before the registration has woken no thread, so the items are
      // prepared again.
      prepared.reset();
    }
    if (spot_.take_news() || !prepared) {
      prepared = prepare(interests, sleep ? &sleep->lease.event() : nullptr);
    }
    bool is_ready = take_wake_up() || prepared == PeerLink::Look::kReady;
    if (!is_ready && !interrupt_.is_raised()) {
      Deadline look_at = deadline;
      bool has_dialed = false;
      if (prepared == PeerLink::Look::kUnconnected) {
        const auto dialed = dial_missing(interests, deadline, look_at);
        if (!dialed.ok()) return dialed.error();
        has_dialed = *dialed;
      }
      if (has_dialed) {
        prepared.reset();
      } else if (const auto found = poll(sleep ? look_at : kAtOnce)) {
        is_ready = *found;
        prepared.reset();
      }
    }
    if (interrupt_.is_raised()) return interrupted_error(rank(), interests);
    // The deadline is checked also if a channel is ready, because an operation must not exceed its
    // deadline when bytes trickle in.
    if ((is_ready || sleep) && deadline.has_passed(system.now())) {
      return timeout_error(rank(), interests);
    }
    if (is_ready) return {};
    if (!sleep && links_->options_.is_crowded) system.yield();
  }
}

bool StreamTransport::take_wake_up() {
  return is_woken_.load(std::memory_order_acquire) &&
         is_woken_.exchange(false, std::memory_order_acq_rel);
}

PeerLink::Look StreamTransport::prepare(std::span<const ChannelInterest> interests,
                                        os::Event* event) {
  polled_.clear();
  items_.clear();
  auto best = PeerLink::Look::kWait;
  for (const ChannelInterest& interest : interests) {
    StreamChannel& channel = stream_channel(interest.peer);
    const auto look = channel.link().prepare_wait(channel.stream(), interest, polled_, items_);
    if (look == PeerLink::Look::kReady) return look;
    if (look == PeerLink::Look::kUnconnected) best = look;
  }
  if (event != nullptr) items_.push_back({.target = event, .want_read = true});
  return best;
}

std::optional<bool> StreamTransport::poll(Deadline deadline) {
  if (!links_->system_.poll(items_, deadline)) return std::nullopt;
  bool is_ready = false;
  for (size_t i = 0; i < polled_.size(); ++i) {
    if (!items_[i].can_read && !items_[i].can_write) continue;
    is_ready |= polled_[i].link->handle_ready(polled_[i], items_[i]);
  }
  if (items_.size() > polled_.size() && items_.back().can_read) {
    static_cast<os::Event&>(*items_.back().target).clear();
  }
  return is_ready;
}

// Opens one missing connection, if an attempt is due. Connections that the operation needs come
// before those of optional interests. Returns whether it tried to open one.
Result<bool> StreamTransport::dial_missing(std::span<const ChannelInterest> interests,
                                           Deadline deadline, Deadline& look_at) {
  for (const bool is_optional : {false, true}) {
    for (const ChannelInterest& interest : interests) {
      if (interest.is_optional != is_optional) continue;
      const DialTurn plan =
          stream_channel(interest.peer).link().plan_dial(interest, links_->system_.now());
      if (plan.step == DialTurn::Step::kLater) look_at = look_at.earlier(Deadline(plan.at));
      if (plan.step != DialTurn::Step::kNow) continue;
      CADRE_RETURN_IF_ERROR(dial(interest, plan.patience, deadline));
      return true;
    }
  }
  return false;
}

Status StreamTransport::dial(const ChannelInterest& interest, Duration patience,
                             Deadline deadline) {
  os::System& system = links_->system_;
  PeerLink& link = stream_channel(interest.peer).link();
  const int peer = options_.members[static_cast<size_t>(interest.peer.value)];
  if (interest.is_optional) patience = std::min(patience, kOptionalDialTime);
  const TimePoint began = system.now();
  Result<std::unique_ptr<os::Socket>> socket = std::unique_ptr<os::Socket>();
  try {
    socket = links_->dial_(peer, deadline.earlier(Deadline(began + patience)));
  } catch (...) {
    link.end_dial(nullptr, began);  // lets another thread start an attempt
    throw;
  }
  const bool is_done = socket.ok();
  const ErrorCode code = is_done ? ErrorCode::kInternal : socket.error().code();
  if (is_done) {
    link.end_dial(std::move(socket).value(), system.now());
  } else if (code == ErrorCode::kTimeout || code == ErrorCode::kAborted) {
    link.end_dial(nullptr, system.now());
    if (code == ErrorCode::kAborted) return socket.error();
  } else if (socket.error().details().is_own_limit) {
    link.end_dial(nullptr, system.now());
    if (!interest.is_optional) return socket.error();
  } else {
    // The next try_send() or try_recv() returns this error, as it does for a connection that has
    // ended.
    link.fail(Error(ErrorCode::kPeerLost, socket.error().message()), system.now());
  }
  return {};
}

StreamTransport::StreamChannel::StreamChannel(StreamTransport& owner, Rank peer)
    : rank_(owner.rank()),
      peer_(peer),
      link_(owner.links_->link(owner.options_.members[static_cast<size_t>(peer.value)])),
      stream_(owner.links_->open_stream(owner.options_.id,
                                        owner.options_.members[static_cast<size_t>(peer.value)],
                                        owner.spot_)) {}

Result<size_t> StreamTransport::StreamChannel::try_send_parts(const Parts& parts) {
  auto sent = link_.try_send(*stream_, parts);
  return sent.ok() ? sent : named(sent.error());
}

Result<size_t> StreamTransport::StreamChannel::try_recv(Bytes buffer) {
  auto received = link_.try_recv(*stream_, buffer);
  return received.ok() ? received : named(received.error());
}

Error StreamTransport::StreamChannel::named(const Error& error) const {
  return error.with_context(cadre::format("rank {}, channel to rank {}", rank_, peer_));
}

}  // namespace cadre
