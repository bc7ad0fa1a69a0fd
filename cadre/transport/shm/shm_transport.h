// A Transport through a shared segment: a byte ring for each ordered pair of ranks.
//
// Threads: as every Transport, one thread at a time. Blocking: only wait(): spin, yield, then sleep
// on this rank's doorbell. Lifetime: the System and the Interrupt outlive it. Destroying it closes
// its ends of the rings, which the peers see as kPeerLost once they have read what was written.
// Errors: kPeerLost, kAborted, kTimeout; kCorruption when a peer's index is impossible;
// kUnavailable, from the constructor and from a first send, when there is no memory for this rank's
// part. The death of a process is not seen here: whoever watches processes raises the Interrupt.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/os/interrupt.h"
#include "cadre/os/shared_memory.h"
#include "cadre/os/system.h"
#include "cadre/transport/shm/ring.h"
#include "cadre/transport/transport.h"

namespace cadre {

struct ShmTransportOptions {
  Rank rank = 0;
  int world_size = 1;
  // More ranks than cores: waiting must give the core away at once.
  bool crowded = false;
};

class ShmTransport final : public Transport {
 public:
  // Size of the segment for rings of `ring_bytes` each, rounded up to a power of two, at least one
  // page.
  static size_t segment_bytes(int world_size, size_t ring_bytes);

  // `segment` has segment_bytes() bytes and is zero at first; every rank maps the same one. The
  // rings' size follows from the segment's, so that all ranks agree on it.
  ShmTransport(os::System& system, os::Interrupt& interrupt, const ShmTransportOptions& options,
               std::shared_ptr<os::SharedMemory> segment);  // shared with the group's other users
  ~ShmTransport() override;

  Rank rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(channels_.size()); }
  Channel& channel(Rank peer) override;
  Status wait(std::span<const ChannelInterest> interests, Deadline deadline) override;
  void wake() override;

 private:
  // Each rank sleeps on one word only, whatever rings it waits for: a peer rings it after every
  // write to, and every read from, a ring of that rank.
  struct alignas(kCacheLine) Doorbell {
    os::WaitWord word;
  };

  class ShmChannel final : public Channel {
   public:
    // `ring_begin`: of the writer's bytes in the segment.
    ShmChannel(ShmTransport& owner, Rank peer, RingWriter writer, size_t ring_begin,
               RingReader reader)
        : owner_(owner), peer_(peer), writer_(writer), ring_begin_(ring_begin), reader_(reader) {}

    Result<size_t> try_send(ConstBytes data) override;
    Result<size_t> try_recv(Bytes buffer) override;
    bool is_ready(const ChannelInterest& interest) const;
    void close();

   private:
    Result<size_t> finish(Result<size_t> moved) const;
    Status reserve_ring();

    ShmTransport& owner_;
    Rank peer_;
    RingWriter writer_;
    size_t ring_begin_;
    bool has_ring_ = false;  // the writer's bytes are allocated
    RingReader reader_;
  };

  static size_t num_rings(int world_size);
  Doorbell& doorbell(Rank rank) const;
  void ring_doorbell_of(Rank peer) const;
  bool is_any_ready(std::span<const ChannelInterest> interests) const;
  bool take_wake_up();

  os::System& system_;
  os::Interrupt& interrupt_;
  Rank rank_;
  std::shared_ptr<os::SharedMemory> segment_;
  std::atomic<bool> is_woken_{false};                // until wait() has seen it
  std::vector<std::optional<ShmChannel>> channels_;  // by rank, none at rank_
  int spins_ = 0;                                    // looks with a pause in between
  int yields_ = 0;                                   // then looks with a yield in between
};

}  // namespace cadre
