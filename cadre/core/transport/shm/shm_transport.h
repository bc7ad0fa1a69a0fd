// A Transport through shared memory: a byte ring for each ordered pair of ranks, made by the first
// send.
//
// Threads: as every Transport, one thread at a time. Blocking: only wait(): spin, yield, then sleep
// on this rank's doorbell. Lifetime: shares the memory; the System and the Interrupt outlive it.
// Destroying it closes its ends of the rings, which the peers see as kPeerLost once they have read
// what was written.
// Errors: kPeerLost, kAborted, kTimeout; kCorruption when a peer's index or ring is impossible,
// from the constructor for a page that is in no slice; kUnavailable from a first send when there is
// no memory for its ring. The death of a process is not seen here: whoever watches processes raises
// the Interrupt.
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
  std::shared_ptr<HostMemory> memory;  // shared with the group's other users
  Rank rank = 0;
  // More ranks than cores: waiting must give the core away at once.
  bool crowded = false;
  // Equal on all ranks; rounded up to a power of two of whole pages. 0: default_ring_bytes().
  size_t ring_bytes = 0;
  std::vector<int> slots;    // in the memory, by rank
  std::vector<Place> pages;  // by rank
  Piece page;                // this rank's, made by cut_page()
};

class ShmTransport final : public Transport {
 public:
  // 512 KiB: a message of 1 MB takes half the time that it takes with 64 KiB, where the writer and
  // the reader of a ring copy alternately instead of at once; one of 4 KB takes a tenth longer. A
  // rank may make a ring to each peer: for more than 16 ranks the rings of a rank take 8 MiB at
  // most, unless that is below 64 KiB each. REQUIRES: num_ranks > 0.
  static size_t default_ring_bytes(size_t num_ranks);

  // This rank's page, before the ranks exchange the places of theirs.
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
  // Each rank sleeps on one word only, whatever rings it waits for: a peer rings it after every
  // write to, and every read from, a ring of that rank.
  struct alignas(kCacheLine) Doorbell {
    os::WaitWord word;
    std::atomic<uint32_t> is_closed;  // the rank has left: it makes no ring and reads none
  };
  // Where the ring to a peer lies. The writer sets the piece last, the reader refuses it at its
  // end.
  struct RingPlace {
    static constexpr uint32_t kRefused = UINT32_MAX;

    std::atomic<uint32_t> piece;  // 0: none yet
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
    // Whether the peer's ring is there; it is looked for.
    Result<bool> find_ring();

    ShmTransport& owner_;
    Rank peer_;
    Piece ring_;  // to the peer, once something was sent
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
  std::vector<Page> pages_;                          // by rank
  std::atomic<bool> is_woken_{false};                // until wait() has seen it
  std::vector<std::optional<ShmChannel>> channels_;  // by rank, none at rank_
  int spins_ = 0;                                    // looks with a pause in between
  int yields_ = 0;                                   // then looks with a yield in between
};

}  // namespace cadre
