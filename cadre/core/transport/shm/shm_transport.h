// A Transport through shared memory. Each ordered pair of ranks has a byte ring, which the first
// send makes.
//
// Threads: one thread at a time, as for every Transport. Blocking: only wait(), which spins, then
// yields, then sleeps on this rank's doorbell. Lifetime: shares the memory; the System and the
// Interrupt outlive the transport. Its destructor closes its ends of the rings. Peers then get
// kPeerLost once they have read what was written.
// Errors: kPeerLost, kAborted, kTimeout; kCorruption if a peer's count or ring is impossible (the
// constructor throws it for a page outside the slices); kUnavailable from the first send to a peer
// if there is no memory for the ring. The transport does not notice the death of a process: whoever
// watches processes raises the Interrupt.
// Format: docs/formats/shared-memory.md.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/shm/ring.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

struct ShmTransportSetup {
  std::shared_ptr<HostMemory> memory;  // the other parts of the group use it, too
  Rank rank = 0;
  // The host has more ranks than cores. Waiting then gives up the core at once.
  bool crowded = false;
  // The size in bytes of each ring, which is equal on all ranks. It is rounded up to a power of
  // two, at least a page. 0 means default_ring_bytes().
  size_t ring_bytes = 0;
  std::vector<int> slots;    // slots[r] is the slot of rank r in the memory
  std::vector<Place> pages;  // pages[r] is the page of rank r
  Piece page;                // the page of this rank, which cut_page() has made
};

class ShmTransport final : public Transport {
 public:
  // Returns 512 KiB, or less for more than 16 ranks: a rank may make a ring to each peer, and the
  // rings of one rank take at most 8 MiB, unless rings of 64 KiB take more. With rings of 512 KiB a
  // message of 1 MB takes half the time that it takes with 64 KiB, where writer and reader copy
  // alternately instead of at the same time; a message of 4 KB takes a tenth longer. REQUIRES:
  // num_ranks > 0.
  static size_t default_ring_bytes(size_t num_ranks);

  // Allocates this rank's page. Called before the ranks exchange the places of their pages.
  static Result<Piece> cut_page(HostMemory& memory, std::span<const int> slots);

  ShmTransport(os::System& system, os::Interrupt& interrupt, ShmTransportSetup setup);
  ~ShmTransport() override;
  ShmTransport(const ShmTransport&) = delete;
  ShmTransport& operator=(const ShmTransport&) = delete;

  Rank rank() const override { return setup_.rank; }
  int world_size() const override { return static_cast<int>(channels_.size()); }
  Channel& channel(Rank peer) override;
  Status wait(std::span<const ChannelInterest> interests, Deadline deadline) override;
  void wake() override;

 private:
  // Each rank sleeps on one word, whichever rings it waits for: a peer rings the doorbell after
  // every write to, and every read from, a ring of that rank.
  struct alignas(kCacheLine) Doorbell {
    os::WaitWord word;
    std::atomic<uint32_t> is_closed;  // the rank has left: it makes no ring and reads none
  };
  // The place of the ring to a peer. The writer stores the piece last. The reader stores kRefused
  // when it closes.
  struct RingPlace {
    static constexpr uint32_t kRefused = UINT32_MAX;

    std::atomic<uint32_t> piece;  // 0 means that there is no ring yet
    uint32_t padding;
    std::atomic<uint64_t> offset;
  };
  static_assert(sizeof(RingPlace) == sizeof(Place));

  // A rank's page: its doorbell, then a RingPlace for each peer.
  class Page {
   public:
    explicit Page(std::byte* bytes) : bytes_(bytes) {}
    Doorbell& doorbell() const { return *reinterpret_cast<Doorbell*>(bytes_); }
    RingPlace& ring_to(Rank peer) const {
      return reinterpret_cast<RingPlace*>(bytes_ + sizeof(Doorbell))[peer.value];
    }

   private:
    std::byte* bytes_;
  };

  class ShmChannel final : public Channel {
   public:
    ShmChannel(ShmTransport& owner, Rank peer) : owner_(owner), peer_(peer) {}

    Result<size_t> try_send(ConstBytes data) override;
    Result<size_t> try_recv(Bytes buffer) override;
    bool is_ready(const ChannelInterest& interest);
    void close();

   private:
    Result<size_t> finish(Result<size_t> moved) const;
    bool is_peer_closed() const;
    Status make_ring();
    // Maps the peer's ring if the peer has made it; returns whether it has.
    Result<bool> find_ring();

    ShmTransport& owner_;
    Rank peer_;
    Piece ring_;  // the ring to the peer; empty before the first send
    std::optional<RingWriter> writer_;
    std::optional<RingReader> reader_;
  };

  size_t ring_capacity() const;
  Page page_of(Rank rank) const { return pages_[static_cast<size_t>(rank.value)]; }
  void ring_doorbell_of(Rank peer) const;
  bool is_any_ready(std::span<const ChannelInterest> interests);
  bool take_wake_up();

  os::System& system_;
  os::Interrupt& interrupt_;
  ShmTransportSetup setup_;
  std::vector<Page> pages_;            // pages_[r] is the page of rank r
  std::atomic<bool> is_woken_{false};  // wake() sets it, wait() clears it
  // channels_[r] is the channel to rank r; nullopt for this rank.
  std::vector<std::optional<ShmChannel>> channels_;
  int spins_ = 0;   // the number of looks with a CPU pause after each
  int yields_ = 0;  // the number of further looks with a yield after each
};

}  // namespace cadre
