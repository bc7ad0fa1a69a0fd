#include "cadre/core/comm/symmetric/symmetric_heap.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/queue/refused_call.h"

namespace cadre {
namespace {

constexpr size_t kPageBytes = 4096;

size_t round_to_page(size_t num_bytes) {
  return (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Returns the size of the signals at the beginning of each piece. They are counters, one for each
// sending rank and slot. Only the sending rank increments its counters.
size_t signal_bytes(int world_size) {
  return round_to_page(static_cast<size_t>(world_size) * SymmetricBuffer::kNumSignals *
                       sizeof(os::WaitWord));
}

struct alignas(kPageBytes) Page {
  std::byte bytes[kPageBytes];
};

// The state of a buffer. Each piece begins with the signals; the data follows them.
struct BufferParts {
  os::System& system;
  Rank rank = 0;
  size_t num_bytes = 0;
  std::vector<std::byte*>
      pieces;        // pieces[r] is the piece of rank r; null if this rank cannot access it
  Piece piece = {};  // is set if the memory is shared
  std::vector<Page> pages = {};        // is set if the memory is private
  std::shared_ptr<HostMemory> memory;  // as SymmetricHeap::Parts::memory
  std::vector<SlotPlace> places = {};  // the places of the pieces, if the memory is shared
  std::weak_ptr<SignalWaits> waits;
  std::shared_ptr<const ForkGuard> fork_guard;
  std::shared_ptr<OneSidedAccess> access;
};

// The places of the pieces, which the ranks exchange. They are allocated separately, because the
// engine may still use them after the call has failed.
struct PlaceExchange {
  std::array<Place, 1> own = {};
  std::vector<Place> places;
};

class HeapBuffer final : public SymmetricBuffer, public OneSidedAccess::Memory {
 public:
  explicit HeapBuffer(BufferParts parts) : parts_(std::move(parts)), taken_(num_words()) {}
  ~HeapBuffer() override;

  Bytes local() const override { return data_of(parts_.rank); }
  bool shares_memory() const override { return parts_.memory != nullptr; }
  ConstBytes peer(Rank rank) const override;
  Bytes writable_peer(Rank rank) const override;
  Bytes contiguous() override;
  ConstBytes view() override { return map_all("view"); }
  void signal(Rank peer, uint32_t slot) override;
  void wait_signal(Rank from, uint32_t slot, Deadline deadline) override;

  // Withdraws the data but not the signals, which stay shared: a wait for one ends with the
  // failure.
  Status withdraw(std::string_view reason) override;

 private:
  size_t num_words() const { return parts_.pieces.size() * kNumSignals; }
  Bytes data_of(Rank rank) const;
  // The word that rank `from` increments and rank `to` waits for.
  os::WaitWord& word(Rank from, Rank to, uint32_t slot) const;
  void check(std::string_view call, Rank peer) const;
  // Throws if the rank has revoked its memory, because peers may see old pages of it, and if peers
  // have reported this rank as lost and may have reused their memory.
  void check_not_revoked(std::string_view call, Rank rank) const;
  // Returns whether the memory was withdrawn because the group has failed for this or the other
  // rank.
  bool is_withdrawn(Rank rank) const;
  bool is_in_group(Rank rank) const {
    return rank >= 0 && rank < static_cast<int>(parts_.pieces.size());
  }
  // Called before the program gets a pointer through which it may write to the piece of a peer.
  void announce_writer(std::string_view call, Rank rank) const;
  [[noreturn]] void refuse_revoked(std::string_view call, Rank rank) const;
  Bytes map_all(std::string_view call);
  void check_slot(std::string_view call, uint32_t slot) const;
  [[noreturn]] void refuse_reach(std::string_view call) const;

  BufferParts parts_;
  // The number of signals that waits have taken already, for each sending rank and slot.
  std::vector<std::atomic<uint32_t>> taken_;
  std::mutex mutex_;
  std::unique_ptr<os::SharedMemory> view_;  // mutex_ guards it
};

// Does nothing in a forked child, where the piece and the holds on the pieces of peers belong to
// the parent.
HeapBuffer::~HeapBuffer() {
  if (parts_.fork_guard->is_in_child()) {
    static_cast<void>(std::make_unique<Piece>(std::move(parts_.piece)).release());
    return;
  }
  for (size_t rank = 0; rank < parts_.places.size(); ++rank) {
    if (parts_.rank == static_cast<int>(rank)) continue;
    parts_.memory->release_hold(parts_.places[rank].slot, parts_.places[rank].place.piece);
  }
}

Bytes HeapBuffer::data_of(Rank rank) const {
  const size_t world_size = parts_.pieces.size();
  return {
      parts_.pieces[static_cast<size_t>(rank.value)] + signal_bytes(static_cast<int>(world_size)),
      parts_.num_bytes};
}

os::WaitWord& HeapBuffer::word(Rank from, Rank to, uint32_t slot) const {
  auto* const words = reinterpret_cast<os::WaitWord*>(parts_.pieces[static_cast<size_t>(to.value)]);
  return words[static_cast<size_t>(from.value) * kNumSignals + slot];
}

void HeapBuffer::check(std::string_view call, Rank peer) const {
  parts_.fork_guard->check();
  parts_.access->check();
  check_rank(call, "the peer", peer, static_cast<int>(parts_.pieces.size()));
  if (parts_.pieces[static_cast<size_t>(peer.value)] == nullptr) refuse_reach(call);
  check_not_revoked(call, peer);
}

void HeapBuffer::check_not_revoked(std::string_view call, Rank rank) const {
  if (parts_.memory == nullptr) return;
  const SlotPlace& at = parts_.places[static_cast<size_t>(rank.value)];
  if (parts_.memory->is_revoked(at.slot, at.place.piece) || is_withdrawn(rank)) {
    refuse_revoked(call, rank);
  }
  if (rank == parts_.rank || !parts_.memory->has_lost_holds()) return;
  throw Error(ErrorCode::kAborted,
              format("{}: peers have reported rank {} as lost and may have used their symmetric "
                     "memory again; look at the first failure",
                     call, parts_.rank))
      .with_culprit(parts_.rank);
}

bool HeapBuffer::is_withdrawn(Rank rank) const {
  if (parts_.memory == nullptr) return false;
  const SlotPlace& at = parts_.places[static_cast<size_t>(rank.value)];
  return parts_.memory->is_withdrawn(at.slot, at.place.piece);
}

void HeapBuffer::announce_writer(std::string_view call, Rank rank) const {
  if (parts_.memory == nullptr || rank == parts_.rank) return;
  const SlotPlace& at = parts_.places[static_cast<size_t>(rank.value)];
  // If the announcement fails, the memory was withdrawn, or this rank was reported as lost, since
  // the check before.
  if (!parts_.memory->announce_writer(at.slot, at.place.piece)) check_not_revoked(call, rank);
}

void HeapBuffer::refuse_revoked(std::string_view call, Rank rank) const {
  throw Error(ErrorCode::kAborted,
              format("{}: rank {} took this symmetric memory back from its peers after a failure, "
                     "so its pages are no longer shared; look at the first failure and allocate "
                     "new memory",
                     call, rank))
      .with_culprit(rank.value);
}

void HeapBuffer::check_slot(std::string_view call, uint32_t slot) const {
  if (slot < kNumSignals) return;
  refuse_call(format("{}: signal slot {} of {}; expected 0 to {}", call, slot, kNumSignals,
                     kNumSignals - 1));
}

void HeapBuffer::refuse_reach(std::string_view call) const {
  refuse_call(
      format("{}: the ranks of this group share no memory, so rank {} can access only its own "
             "piece; check shares_memory() first, and use send and recv instead",
             call, parts_.rank));
}

ConstBytes HeapBuffer::peer(Rank rank) const {
  check("peer", rank);
  return data_of(rank);
}

Bytes HeapBuffer::writable_peer(Rank rank) const {
  check("writable_peer", rank);
  announce_writer("writable_peer", rank);
  return data_of(rank);
}

Bytes HeapBuffer::contiguous() {
  const Bytes all = map_all("contiguous");
  for (size_t rank = 0; rank < parts_.places.size(); ++rank) {
    announce_writer("contiguous", static_cast<int>(rank));
  }
  return all;
}

Bytes HeapBuffer::map_all(std::string_view call) {
  parts_.fork_guard->check();
  parts_.access->check();
  if (parts_.memory == nullptr) refuse_reach(call);
  for (size_t rank = 0; rank < parts_.places.size(); ++rank) {
    check_not_revoked(call, static_cast<int>(rank));
  }
  const std::lock_guard lock(mutex_);
  if (view_ == nullptr) {
    std::vector<SlotPlace> places = parts_.places;
    for (SlotPlace& at : places) {
      at.place.offset += signal_bytes(static_cast<int>(parts_.pieces.size()));
    }
    const size_t padded = round_to_page(std::max<size_t>(parts_.num_bytes, 1));
    view_ = parts_.memory->map_side_by_side(places, padded).value_or_throw();
  }
  return view_->bytes();
}

Status HeapBuffer::withdraw(std::string_view reason) {
  if (parts_.memory == nullptr || parts_.fork_guard->is_in_child()) return {};
  Place data = parts_.places[static_cast<size_t>(parts_.rank.value)].place;
  data.offset += signal_bytes(static_cast<int>(parts_.pieces.size()));
  return parts_.memory->withdraw(data, parts_.num_bytes, reason);
}

// Increments the word. System::publish() would store a value, but several threads of one rank may
// signal at once.
void HeapBuffer::signal(Rank peer, uint32_t slot) {
  check("signal", peer);
  check_not_revoked("signal", parts_.rank);
  check_slot("signal", slot);
  os::WaitWord& counter = word(parts_.rank, peer, slot);
  counter.value.fetch_add(1, std::memory_order_seq_cst);
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) parts_.system.wake(counter);
}

void HeapBuffer::wait_signal(Rank from, uint32_t slot, Deadline deadline) {
  parts_.fork_guard->check();
  const auto waits = parts_.waits.lock();
  // A peer that has heard of a failure first has withdrawn its memory. This rank must throw the
  // failure, too.
  if (waits != nullptr && is_in_group(from) && is_withdrawn(from)) waits->await_failure();
  check("wait_signal", from);
  check_slot("wait_signal", slot);
  if (waits == nullptr) {
    refuse_call("wait_signal: the group of this buffer is gone; wait before it is destroyed");
  }
  const size_t index = static_cast<size_t>(from.value) * kNumSignals + slot;
  const uint32_t value = taken_[index].fetch_add(1, std::memory_order_relaxed) + 1;
  waits->wait({word(from, parts_.rank, slot), value, from, slot}, deadline);
  // A signal says that memory may be read, but the memory of either rank may have been revoked
  // since the signal was sent.
  if (is_withdrawn(from)) waits->await_failure();
  parts_.access->check();
  check_not_revoked("wait_signal", from);
  check_not_revoked("wait_signal", parts_.rank);
}

}  // namespace

size_t SymmetricHeap::held_bytes(size_t num_bytes, int world_size) {
  return signal_bytes(world_size) + round_to_page(std::max<size_t>(num_bytes, 1));
}

Result<std::shared_ptr<SymmetricBuffer>> SymmetricHeap::allocate(const OpContext& op,
                                                                 size_t num_bytes,
                                                                 const Await& await) {
  if (parts_.memory != nullptr) return allocate_shared(op, num_bytes, await);
  if (parts_.backend != nullptr) {
    const Collective barrier = Collective::barrier();
    // A barrier has no buffers: the empty exchange only shows whether the engine has ended it.
    CADRE_RETURN_IF_ERROR(
        await(parts_.backend->submit(op, {&barrier, 1}), std::make_shared<PlaceExchange>()));
  }
  BufferParts made{.system = parts_.system, .rank = parts_.rank, .num_bytes = num_bytes};
  made.pages.resize(held_bytes(num_bytes, parts_.world_size) / kPageBytes);
  made.pieces.resize(static_cast<size_t>(parts_.world_size));
  made.pieces[static_cast<size_t>(parts_.rank.value)] = made.pages.data()->bytes;
  made.waits = parts_.waits;
  made.fork_guard = parts_.fork_guard;
  made.access = parts_.access;
  return std::shared_ptr<SymmetricBuffer>(std::make_shared<HeapBuffer>(std::move(made)));
}

Result<std::shared_ptr<SymmetricBuffer>> SymmetricHeap::allocate_shared(const OpContext& op,
                                                                        size_t num_bytes,
                                                                        const Await& await) {
  const size_t piece_bytes = held_bytes(num_bytes, parts_.world_size);
  auto piece = parts_.memory->allocate({.num_bytes = piece_bytes, .holders = parts_.slots});
  if (!piece.ok()) return piece.error();
  const auto exchanged = std::make_shared<PlaceExchange>(
      PlaceExchange{{piece->place()}, std::vector<Place>(parts_.slots.size())});
  const Collective exchange =
      Collective::all_gather(std::as_bytes(std::span(exchanged->own)),
                             std::as_writable_bytes(std::span(exchanged->places)), DType::kUint8);
  CADRE_RETURN_IF_ERROR(await(parts_.backend->submit(op, {&exchange, 1}), exchanged));
  const std::vector<Place>& places = exchanged->places;
  BufferParts made{.system = parts_.system, .rank = parts_.rank, .num_bytes = num_bytes};
  for (size_t rank = 0; rank < places.size(); ++rank) {
    made.places.push_back({parts_.slots[rank], places[rank]});
    std::byte* const begin = parts_.memory->resolve(made.places.back(), piece_bytes);
    if (begin == nullptr || places[rank].offset % kPageBytes != 0) {
      return Error(
          ErrorCode::kCorruption,
          format("rank {} announced a piece of {} bytes at offset {}, which is not in its slice "
                 "of the host's memory",
                 rank, piece_bytes, places[rank].offset));
    }
    made.pieces.push_back(begin);
  }
  made.piece = std::move(piece).value();
  made.memory = parts_.memory;
  made.waits = parts_.waits;
  made.fork_guard = parts_.fork_guard;
  made.access = parts_.access;
  auto buffer = std::make_shared<HeapBuffer>(std::move(made));
  parts_.access->add(buffer);
  return std::shared_ptr<SymmetricBuffer>(std::move(buffer));
}

}  // namespace cadre
