#include "cadre/transport/tcp/tcp_transport.h"

#include <algorithm>

#include "cadre/base/format.h"
#include "cadre/transport/wait_error.h"

namespace cadre {
namespace {

// One look costs about half a microsecond, waking from sleep 10 to 25: so looking for some 50 us
// costs at most a few times what it can save. Ranks that share a core let each other run instead of
// looking again.
constexpr int kLooks = 100;
constexpr int kLooksWhenCrowded = 10;

constexpr Deadline kAtOnce{TimePoint{0}};

}  // namespace

TcpTransport::TcpTransport(os::System& system, os::Interrupt& interrupt,
                           const TcpTransportOptions& options,
                           std::vector<std::unique_ptr<os::Socket>> peers)
    : system_(system),
      interrupt_(interrupt),
      rank_(options.rank),
      is_crowded_(options.crowded),
      wake_up_(system.make_event()) {
  num_looks_ = system.spin_limit() == 0 ? 0 : is_crowded_ ? kLooksWhenCrowded : kLooks;
  channels_.resize(peers.size());
  for (size_t peer = 0; peer < peers.size(); ++peer) {
    if (peers[peer]) channels_[peer].emplace(rank_, static_cast<int>(peer), std::move(peers[peer]));
  }
}

Channel& TcpTransport::channel(Rank peer) {
  return channels_[static_cast<size_t>(peer.value)].value();
}

Status TcpTransport::wait(std::span<const ChannelInterest> interests, Deadline deadline) {
  items_.clear();
  for (const ChannelInterest& interest : interests) {
    items_.push_back({.target = &channels_[static_cast<size_t>(interest.peer.value)]->socket(),
                      .want_read = interest.want_recv,
                      .want_write = interest.want_send});
  }
  const size_t wake_up_at = items_.size();
  items_.push_back({.target = wake_up_.get(), .want_read = true});
  items_.push_back({.target = &interrupt_.event(), .want_read = true});
  for (;;) {
    const bool is_ready = is_ready_soon() || system_.poll(items_, deadline);
    if (items_[wake_up_at].can_read) wake_up_->clear();
    if (interrupt_.is_raised()) return interrupted_error(rank_, interests);
    // Also when something is ready: a trickle of bytes must not carry an operation over its
    // deadline.
    if (deadline.has_passed(system_.now())) return timeout_error(rank_, interests);
    if (is_ready) return {};
  }
}

bool TcpTransport::is_ready_soon() {
  for (int look = 0; look < num_looks_; ++look) {
    if (system_.poll(items_, kAtOnce)) return true;
    if (is_crowded_) system_.yield();
  }
  return false;
}

Result<size_t> TcpTransport::TcpChannel::try_send(ConstBytes data) {
  auto taken = socket_->try_send(data);
  return taken.ok() ? taken : named(taken.error());
}

Result<size_t> TcpTransport::TcpChannel::try_recv(Bytes buffer) {
  auto received = socket_->try_recv(buffer);
  return received.ok() ? received : named(received.error());
}

Error TcpTransport::TcpChannel::named(const Error& error) const {
  return error.with_context(cadre::format("rank {}, channel to rank {}", rank_, peer_));
}

}  // namespace cadre
