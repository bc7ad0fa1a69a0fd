// A Transport through shared memory. Each ordered pair of ranks has a byte ring, which the sender
// makes at its first send.
//
// Threads: one thread at a time uses a transport; only wake() may be called from any thread.
// Blocking: only wait(), which spins, then yields, then sleeps on this rank's doorbell. Lifetime:
// shares the memory; the System and the Interrupt outlive the transport. The destructor closes this
// rank's ends of the rings; peers then get kPeerLost after they have read all bytes that this rank
// wrote.
// Errors: kPeerLost, kAborted, kTimeout; kCorruption if a ring has an impossible count of bytes, or
// if a peer's ring or page is outside of its slice of the memory (the constructor throws the error
// of a page); kUnavailable from the first send to a peer if there is no memory for the ring. The
// transport does not detect the death of a process: the control plane detects it and raises the
// group's Interrupt.
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
  std::shared_ptr<HostMemory> memory;  // shared with the rest of the group
  Rank rank = 0;
  // True if the host has more ranks than cores. Then wait() yields the core at once instead of
  // spinning.
  bool crowded = false;
  // The size in bytes of each ring, which is equal on all ranks. It is rounded up to a power of two
  // and to at least a page. 0 means default_ring_bytes().
  size_t ring_bytes = 0;
  std::vector<int> slots;    // slots[r] is the slot of rank r in the host memory
  std::vector<Place> pages;  // pages[r] is the page of rank r
  Piece page;                // this rank's page, allocated by cut_page()
};

class ShmTransport final : public Transport {
 public:
  // Returns 512 KiB, or less for more than 16 ranks: a rank may make a ring to each peer, and its
  // rings should take at most 8 MiB together. The minimum is 64 KiB. Measured: with rings of 512
  // KiB a message of 1 MB takes half the time that it takes with 64 KiB, where writer and reader
  // copy alternately; a message of 4 KB takes a tenth longer. REQUIRES: num_ranks > 0.
  static size_t default_ring_bytes(size_t num_ranks);

  // Allocates this rank's page. Must be called before the ranks exchange the places of their pages.
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
  // The word on which a rank sleeps, whichever rings it waits for. A peer increments the word
  // ("rings the doorbell") after every write to, and every read from, a ring that it shares with
  // this rank.
  struct alignas(kCacheLine) Doorbell {
    os::WaitWord word;
    // The rank has closed its transport: it makes no ring and reads none.
    std::atomic<uint32_t> is_closed;
  };
  // Where the ring to a peer is in the host memory. The writer stores `piece` last, which publishes
  // the ring. A reader that closes its end stores kRefused in `piece`.
  struct RingPlace {
    static constexpr uint32_t kRefused = UINT32_MAX;

    // The id of the piece of memory with the ring; 0 if there is no ring yet.
    std::atomic<uint32_t> piece;
    uint32_t padding;
    std::atomic<uint64_t> offset;
  };
  static_assert(sizeof(RingPlace) == sizeof(Place));

  // The page of a rank, in shared memory: its doorbell, then the RingPlace of its ring to each
  // peer.
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
    // Maps the peer's ring if the peer has made one. Returns whether it has.
    Result<bool> find_ring();

    ShmTransport& owner_;
    Rank peer_;
    Piece ring_;  // the ring to the peer, made by the first send
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
  std::atomic<bool> is_woken_{false};  // set by wake(), cleared by wait()
  // channels_[r] is the channel to rank r; nullopt for this rank.
  std::vector<std::optional<ShmChannel>> channels_;
  int spins_ = 0;   // how often wait() checks the rings with a CPU pause in between
  int yields_ = 0;  // how often wait() then checks the rings with a yield in between
};

}  // namespace cadre
