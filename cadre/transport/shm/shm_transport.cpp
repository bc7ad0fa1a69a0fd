#include "cadre/transport/shm/shm_transport.h"

#include <algorithm>
#include <bit>

#include "cadre/base/format.h"
#include "cadre/os/shared_pages.h"
#include "cadre/transport/shm/cpu_pause.h"
#include "cadre/transport/wait_error.h"

namespace cadre {
namespace {

constexpr size_t kPage = 4096;
// Yields are system calls of half a microsecond and more; after so many, sleep is cheaper.
constexpr int kYields = 50;

}  // namespace

size_t ShmTransport::num_rings(int world_size) {
  return static_cast<size_t>(world_size) * static_cast<size_t>(world_size - 1);
}

size_t ShmTransport::segment_bytes(int world_size, size_t ring_bytes) {
  const size_t capacity = std::bit_ceil(std::max(ring_bytes, kPage));
  return static_cast<size_t>(world_size) * sizeof(Doorbell) +
         num_rings(world_size) * (sizeof(RingControl) + capacity);
}

// The segment: one doorbell for each rank, the controls of all rings, then their bytes. Rings are
// in the order of (writer, reader), without the pairs of a rank and itself.
ShmTransport::ShmTransport(os::System& system, os::Interrupt& interrupt,
                           const ShmTransportOptions& options,
                           std::shared_ptr<os::SharedMemory> segment)
    : system_(system), interrupt_(interrupt), rank_(options.rank), segment_(std::move(segment)) {
  const int world_size = options.world_size;
  channels_.resize(static_cast<size_t>(world_size));
  const Bytes bytes = segment_->bytes();
  const size_t rings = num_rings(world_size);
  const size_t controls_at = static_cast<size_t>(world_size) * sizeof(Doorbell);
  const size_t data_at = controls_at + rings * sizeof(RingControl);
  if (bytes.size() < segment_bytes(world_size, kPage)) {
    throw Error(ErrorCode::kInternal,
                cadre::format("shared-memory transport: a segment of {} bytes for {} ranks, at "
                              "least {} needed",
                              bytes.size(), world_size, segment_bytes(world_size, kPage)));
  }
  os::reserve_pages(*segment_, 0, data_at).value_or_throw();
  if (rings == 0) return;
  const size_t capacity = std::bit_floor((bytes.size() - data_at) / rings);
  auto* controls = reinterpret_cast<RingControl*>(bytes.data() + controls_at);
  const auto ring_index = [&](int from, int to) {
    return static_cast<size_t>(from) * static_cast<size_t>(world_size - 1) +
           static_cast<size_t>(to < from ? to : to - 1);
  };
  const auto data_of = [&](size_t index) {
    return bytes.subspan(data_at + index * capacity, capacity);
  };
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank_.value) continue;
    const size_t out = ring_index(rank_.value, peer);
    const size_t in = ring_index(peer, rank_.value);
    channels_[static_cast<size_t>(peer)].emplace(
        *this, peer, RingWriter(controls[out], data_of(out)), data_at + out * capacity,
        RingReader(controls[in], data_of(in)));
  }
  spins_ = options.crowded ? 0 : system.spin_limit();
  yields_ = system.spin_limit() > 0 ? kYields : 0;
}

ShmTransport::~ShmTransport() {
  for (auto& channel : channels_) {
    if (channel) channel->close();
  }
}

Channel& ShmTransport::channel(Rank peer) {
  return channels_[static_cast<size_t>(peer.value)].value();
}

ShmTransport::Doorbell& ShmTransport::doorbell(Rank rank) const {
  return reinterpret_cast<Doorbell*>(segment_->bytes().data())[rank.value];
}

// Adds instead of System::publish, which stores: of two peers that ring at once one would store
// what the other has stored, and this rank, having read the first ring, would sleep through the
// second.
void ShmTransport::ring_doorbell_of(Rank peer) const {
  os::WaitWord& word = doorbell(peer).word;
  word.value.fetch_add(1, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) system_.wake(word);
}

bool ShmTransport::is_any_ready(std::span<const ChannelInterest> interests) const {
  return std::ranges::any_of(interests, [&](const ChannelInterest& interest) {
    return channels_[static_cast<size_t>(interest.peer.value)]->is_ready(interest);
  });
}

// The flag first: who reads the word that this rings has the flag too.
void ShmTransport::wake() {
  is_woken_.store(true, std::memory_order_release);
  ring_doorbell_of(rank_);
}

bool ShmTransport::take_wake_up() {
  return is_woken_.load(std::memory_order_acquire) &&
         is_woken_.exchange(false, std::memory_order_acq_rel);
}

Status ShmTransport::wait(std::span<const ChannelInterest> interests, Deadline deadline) {
  os::WaitWord& word = doorbell(rank_).word;
  for (int look = 0;; ++look) {
    // Before the rings are looked at: whatever comes after that look changes the word.
    const uint32_t seen = word.value.load(std::memory_order_acquire);
    const bool is_ready = is_any_ready(interests) || take_wake_up();
    if (interrupt_.is_raised()) return interrupted_error(rank_, interests);
    // Reading the clock costs as much as the whole look, so only where it matters; a trickle of
    // bytes must not carry an operation over its deadline.
    const bool is_long = is_ready || look >= spins_;
    if (is_long && deadline.has_passed(system_.now())) return timeout_error(rank_, interests);
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
  if (!has_ring_) CADRE_RETURN_IF_ERROR(reserve_ring());
  return finish(writer_.try_write(data));
}

Status ShmTransport::ShmChannel::reserve_ring() {
  CADRE_RETURN_IF_ERROR(os::reserve_pages(*owner_.segment_, ring_begin_, writer_.capacity()));
  has_ring_ = true;
  return {};
}

Result<size_t> ShmTransport::ShmChannel::try_recv(Bytes buffer) {
  return finish(reader_.try_read(buffer));
}

Result<size_t> ShmTransport::ShmChannel::finish(Result<size_t> moved) const {
  if (!moved.ok()) {
    return moved.error().with_context(
        cadre::format("rank {}, channel to rank {}", owner_.rank_, peer_));
  }
  if (*moved > 0) owner_.ring_doorbell_of(peer_);
  return moved;
}

bool ShmTransport::ShmChannel::is_ready(const ChannelInterest& interest) const {
  return (interest.want_send && writer_.is_ready()) || (interest.want_recv && reader_.is_ready());
}

void ShmTransport::ShmChannel::close() {
  writer_.close();
  reader_.close();
  owner_.ring_doorbell_of(peer_);
}

}  // namespace cadre
