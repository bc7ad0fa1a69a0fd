#include "cadre/core/transport/shm/shm_transport.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/transport/shm/cpu_pause.h"
#include "cadre/core/transport/wait_error.h"

namespace cadre {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLeastRingBytes = 64 << 10;
constexpr size_t kMostRingBytes = 512 << 10;
constexpr size_t kRingBytesOfRank = 8 << 20;
// The number of yields before wait() sleeps. A yield is a system call of at least half a
// microsecond, so after this many, sleeping is cheaper.
constexpr int kYields = 50;

Error closed_end() {
  return Error(ErrorCode::kPeerLost, "shared-memory transport: the peer has closed its end");
}

}  // namespace

Result<Piece> ShmTransport::cut_page(HostMemory& memory, std::span<const int> slots) {
  return memory.allocate(
      {.num_bytes = sizeof(Doorbell) + slots.size() * sizeof(RingPlace), .holders = slots});
}

ShmTransport::ShmTransport(os::System& system, os::Interrupt& interrupt, ShmTransportSetup setup)
    : system_(system), interrupt_(interrupt), setup_(std::move(setup)) {
  const size_t world_size = setup_.slots.size();
  channels_.resize(world_size);
  for (size_t peer = 0; peer < world_size; ++peer) {
    const SlotPlace at{setup_.slots[peer], setup_.pages[peer]};
    std::byte* const page =
        setup_.memory->resolve(at, sizeof(Doorbell) + world_size * sizeof(RingPlace));
    if (page == nullptr || at.place.offset % kCacheLine != 0) {
      throw Error(
          ErrorCode::kCorruption,
          format("shared-memory transport: the page of rank {} at offset {} of slot {} is not in "
                 "its slice",
                 peer, at.place.offset, at.slot));
    }
    pages_.emplace_back(page);
    if (setup_.rank != static_cast<int>(peer)) {
      channels_[peer].emplace(*this, static_cast<int>(peer));
    }
  }
  spins_ = setup_.crowded ? 0 : system.spin_limit();
  yields_ = system.spin_limit() > 0 ? kYields : 0;
}

ShmTransport::~ShmTransport() {
  page_of(setup_.rank).doorbell().is_closed.store(1, std::memory_order_seq_cst);
  for (auto& channel : channels_) {
    if (channel) channel->close();
  }
  for (size_t peer = 0; peer < channels_.size(); ++peer) {
    if (!channels_[peer]) continue;
    setup_.memory->release_hold(setup_.slots[peer], setup_.pages[peer].piece);
  }
}

size_t ShmTransport::default_ring_bytes(size_t num_ranks) {
  const size_t share = std::bit_floor(kRingBytesOfRank / num_ranks);
  return std::clamp(share, kLeastRingBytes, kMostRingBytes);
}

size_t ShmTransport::ring_capacity() const {
  const size_t wanted =
      setup_.ring_bytes > 0 ? setup_.ring_bytes : default_ring_bytes(channels_.size());
  return std::bit_ceil(std::max(wanted, kPage));
}

Channel& ShmTransport::channel(Rank peer) {
  return channels_[static_cast<size_t>(peer.value)].value();
}

// Increments the word instead of System::publish(), which stores a value: two peers that ring the
// doorbell at the same time could store the same value. The owner of the doorbell, which has read
// the word after the first store, would then not be woken by the second store.
void ShmTransport::ring_doorbell_of(Rank peer) const {
  os::WaitWord& word = page_of(peer).doorbell().word;
  word.value.fetch_add(1, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) system_.wake(word);
}

bool ShmTransport::is_any_ready(std::span<const ChannelInterest> interests) {
  return std::ranges::any_of(interests, [&](const ChannelInterest& interest) {
    return channels_[static_cast<size_t>(interest.peer.value)]->is_ready(interest);
  });
}

// Sets the flag before it changes the word, so a thread that sees the new word also sees the flag.
void ShmTransport::wake() {
  is_woken_.store(true, std::memory_order_release);
  ring_doorbell_of(setup_.rank);
}

bool ShmTransport::take_wake_up() {
  return is_woken_.load(std::memory_order_acquire) &&
         is_woken_.exchange(false, std::memory_order_acq_rel);
}

Status ShmTransport::wait(std::span<const ChannelInterest> interests, Deadline deadline) {
  os::WaitWord& word = page_of(setup_.rank).doorbell().word;
  for (int look = 0;; ++look) {
    // The word is read before the rings are checked, so a change of a ring after that check changes
    // the word, and the sleep below returns.
    const uint32_t seen = word.value.load(std::memory_order_acquire);
    const bool is_ready = is_any_ready(interests) || take_wake_up();
    if (interrupt_.is_raised()) return interrupted_error(setup_.rank, interests);
    // Reading the clock costs as much as checking the rings, so the clock is not read while wait()
    // spins. It is read if a channel is ready, because an operation must not exceed its deadline
    // when bytes trickle in.
    const bool is_long = is_ready || look >= spins_;
    if (is_long && deadline.has_passed(system_.now())) return timeout_error(setup_.rank, interests);
    if (is_ready) return {};
    if (look < spins_) {
      cpu_pause();
    } else if (look < spins_ + yields_) {
      system_.yield();
    } else {
      system_.wait_while(word, seen, deadline);
    }
  }
}

Result<size_t> ShmTransport::ShmChannel::try_send(ConstBytes data) {
  if (data.empty()) return size_t{0};
  if (is_peer_closed()) return finish(closed_end());
  if (!writer_) {
    if (const Status made = make_ring(); !made.ok()) return finish(made.error());
  }
  return finish(writer_->try_write(data));
}

// Allocates the ring to the peer and publishes its place in this rank's page, where the peer looks
// for it. If the peer has closed its end, it has stored kRefused there and would never release the
// ring, so this function releases it.
Status ShmTransport::ShmChannel::make_ring() {
  const int holder = owner_.setup_.slots[static_cast<size_t>(peer_.value)];
  const size_t capacity = owner_.ring_capacity();
  auto ring = owner_.setup_.memory->allocate(
      {.num_bytes = sizeof(RingControl) + capacity, .holders = std::span(&holder, 1)});
  if (!ring.ok()) return ring.error();
  RingPlace& place = owner_.page_of(owner_.setup_.rank).ring_to(peer_);
  place.offset.store(ring->place().offset, std::memory_order_relaxed);
  uint32_t none = 0;
  if (!place.piece.compare_exchange_strong(none, ring->place().piece, std::memory_order_acq_rel)) {
    ring->drop_holders();
    return closed_end();
  }
  ring_ = std::move(ring).value();
  auto& control = *reinterpret_cast<RingControl*>(ring_.bytes().data());
  writer_.emplace(control, ring_.bytes().subspan(sizeof(RingControl), capacity));
  return {};
}

Result<bool> ShmTransport::ShmChannel::find_ring() {
  const RingPlace& place = owner_.page_of(peer_).ring_to(owner_.setup_.rank);
  const uint32_t piece = place.piece.load(std::memory_order_acquire);
  if (piece == 0) return false;
  const SlotPlace at{owner_.setup_.slots[static_cast<size_t>(peer_.value)],
                     {.piece = piece, .offset = place.offset.load(std::memory_order_relaxed)}};
  const size_t capacity = owner_.ring_capacity();
  std::byte* const ring = owner_.setup_.memory->resolve(at, sizeof(RingControl) + capacity);
  if (ring == nullptr || at.place.offset % kCacheLine != 0) {
    return Error(
        ErrorCode::kCorruption,
        format("shared-memory transport: a ring of {} bytes at offset {} of slot {} is not in "
               "its slice",
               capacity, at.place.offset, at.slot));
  }
  reader_.emplace(*reinterpret_cast<RingControl*>(ring),
                  Bytes(ring + sizeof(RingControl), capacity));
  return true;
}

// is_closed is read before find_ring() is called. A peer publishes its ring before it sends and
// closes, so if is_closed is set, find_ring() finds the ring with all bytes that were sent before
// the close.
Result<size_t> ShmTransport::ShmChannel::try_recv(Bytes buffer) {
  if (!reader_) {
    const bool is_closed = is_peer_closed();
    const Result<bool> found = find_ring();
    if (!found.ok()) return finish(found.error());
    if (!*found && is_closed && !buffer.empty()) return finish(closed_end());
    if (!*found) return size_t{0};
  }
  return finish(reader_->try_read(buffer));
}

// Completes a send or receive: returns kAborted if peers have reported this rank as lost, because
// they may have reused the memory from which it has read.
Result<size_t> ShmTransport::ShmChannel::finish(Result<size_t> moved) const {
  const bool has_looked = !moved.ok() || *moved > 0;
  if (has_looked && owner_.setup_.memory->has_lost_holds()) {
    return Error(ErrorCode::kAborted,
                 format("rank {}, channel to rank {}: peers have reported this rank as lost and "
                        "may have reused the memory that it reads; look at the first failure",
                        owner_.setup_.rank, peer_));
  }
  if (!moved.ok()) {
    return moved.error().with_context(
        format("rank {}, channel to rank {}", owner_.setup_.rank, peer_));
  }
  if (*moved > 0) owner_.ring_doorbell_of(peer_);
  return moved;
}

bool ShmTransport::ShmChannel::is_peer_closed() const {
  return owner_.page_of(peer_).doorbell().is_closed.load(std::memory_order_acquire) != 0;
}

// Returns true also if the send or receive would fail, so that the caller tries it and gets its
// error.
bool ShmTransport::ShmChannel::is_ready(const ChannelInterest& interest) {
  if (interest.want_send && (!writer_ || writer_->is_ready() || is_peer_closed())) return true;
  if (!interest.want_recv) return false;
  if (reader_) return reader_->is_ready();
  const RingPlace& place = owner_.page_of(peer_).ring_to(owner_.setup_.rank);
  return place.piece.load(std::memory_order_acquire) != 0 || is_peer_closed();
}

void ShmTransport::ShmChannel::close() {
  if (writer_) writer_->close();
  if (reader_) reader_->close();
  HostMemory& memory = *owner_.setup_.memory;
  const int slot = owner_.setup_.slots[static_cast<size_t>(peer_.value)];
  RingPlace& place = owner_.page_of(peer_).ring_to(owner_.setup_.rank);
  const uint32_t piece = place.piece.exchange(RingPlace::kRefused, std::memory_order_acq_rel);
  if (memory.resolve({slot, {.piece = piece}}, 0) != nullptr) memory.release_hold(slot, piece);
  owner_.ring_doorbell_of(peer_);
}

}  // namespace cadre
