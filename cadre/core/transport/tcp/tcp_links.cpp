#include "cadre/core/transport/tcp/tcp_links.h"

#include <chrono>
#include <utility>

#include "cadre/core/transport/tcp/stream_transport.h"

namespace cadre {
namespace {

constexpr Duration kDrainPause = std::chrono::milliseconds(1);

}  // namespace

TcpLinks::TcpLinks(os::System& system, const TcpLinksOptions& options, Dial dial)
    : system_(system),
      options_(options),
      dial_(std::move(dial)),
      events_(system),
      links_(static_cast<size_t>(options.num_ranks)) {}

PeerLink& TcpLinks::link(int peer) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<PeerLink>& link = links_[static_cast<size_t>(peer)];
  if (link == nullptr) link = std::make_unique<PeerLink>(options_.rank, peer, closed_, meter_);
  return *link;
}

void TcpLinks::add(int peer, std::unique_ptr<os::Socket> socket, ConnectionEnd end) {
  link(peer).add(std::move(socket), end);
}

std::unique_ptr<Transport> TcpLinks::open(StreamId id, std::vector<int> members, Rank rank,
                                          os::Interrupt& interrupt) {
  {
    const std::lock_guard lock(mutex_);
    open_.emplace(id, std::vector<bool>());
  }
  return std::make_unique<StreamTransport>(
      shared_from_this(), StreamTransportOptions{id, std::move(members), rank}, interrupt);
}

PeerLink* TcpLinks::find(int peer) {
  const std::lock_guard lock(mutex_);
  return links_[static_cast<size_t>(peer)].get();
}

// Detaches all streams first, which cannot throw: the transport that owns their WaitSpot is
// destroyed even if a later step throws.
void TcpLinks::close(StreamId id, const std::vector<int>& members) {
  for (const int member : members) {
    if (PeerLink* const link = find(member)) link->detach(id);
  }
  closed_.add(id);
  {
    const std::lock_guard lock(mutex_);
    open_.erase(id);
  }
  for (const int member : members) {
    if (PeerLink* const link = find(member)) link->close(id);
  }
}

// note_left() first records that the peer has left and then looks for the stream. open_stream()
// first opens the stream and then looks for such a record. So if two threads run them at the same
// time, at least one of them finds both and ends the stream.
void TcpLinks::note_left(StreamId id, int peer) {
  PeerLink* link = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto found = open_.find(id);
    if (found == open_.end()) return;
    found->second.resize(links_.size());
    found->second[static_cast<size_t>(peer)] = true;
    link = links_[static_cast<size_t>(peer)].get();
  }
  if (link != nullptr) link->note_left(id);
}

std::shared_ptr<PeerLink::Stream> TcpLinks::open_stream(StreamId id, int peer, WaitSpot& spot) {
  PeerLink& peer_link = link(peer);
  auto stream = peer_link.open(id, spot);
  bool has_left = false;
  {
    const std::lock_guard lock(mutex_);
    const std::vector<bool>& left = open_.at(id);
    has_left = !left.empty() && left[static_cast<size_t>(peer)];
  }
  if (has_left) peer_link.note_left(id);
  return stream;
}

void TcpLinks::drain(Deadline deadline) {
  const std::unique_ptr<os::Waiter> pause = system_.make_waiter();
  while (true) {
    // Each iteration drains all peers, so that a peer that does not receive delays no other.
    size_t num_unsent = 0;
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (PeerLink* const link = find(static_cast<int>(peer))) num_unsent += link->drain();
    }
    if (num_unsent == 0 || deadline.has_passed(system_.now())) return;
    pause->park(deadline.earlier(system_.deadline_in(kDrainPause)));
  }
}

}  // namespace cadre
