// The Transport of one group over the TcpLinks of its process.
//
// Threads, blocking and errors: see tcp_links.h. Only files of tcp/ use this header.
// Lifetime: shares the TcpLinks; the Interrupt outlives it.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/core/os/interrupt.h"
#include "cadre/core/transport/tcp/peer_link.h"
#include "cadre/core/transport/tcp/tcp_links.h"
#include "cadre/core/transport/tcp/wait_spot.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

struct StreamTransportOptions {
  StreamId id;
  std::vector<int> members;
  Rank rank;
};

class StreamTransport final : public Transport {
 public:
  StreamTransport(std::shared_ptr<TcpLinks> links, StreamTransportOptions options,
                  os::Interrupt& interrupt);
  ~StreamTransport() override;

  Rank rank() const override { return options_.rank; }
  int world_size() const override { return static_cast<int>(options_.members.size()); }
  Channel& channel(Rank peer) override { return stream_channel(peer); }
  Status wait(std::span<const ChannelInterest> interests, Deadline deadline) override;
  void wake() override;

 private:
  class StreamChannel final : public Channel {
   public:
    StreamChannel(StreamTransport& owner, Rank peer);

    Result<size_t> try_send(ConstBytes data) override { return try_send_parts({{}, data}); }
    Result<size_t> try_send_parts(const Parts& parts) override;
    Result<size_t> try_recv(Bytes buffer) override;
    PeerLink& link() const { return link_; }
    PeerLink::Stream& stream() const { return *stream_; }

   private:
    Error named(const Error& error) const;

    const Rank rank_;
    const Rank peer_;
    PeerLink& link_;
    const std::shared_ptr<PeerLink::Stream> stream_;  // shared with the link
  };

  // The registrations through which other threads wake a thread that sleeps in wait().
  struct Sleep {
    Sleep(StreamTransport& owner, os::EventPool::Lease event)
        : lease(std::move(event)),
          registration(owner.interrupt_, lease.event()),
          stay(owner.spot_, lease.event()) {}

    const os::EventPool::Lease lease;
    const os::Interrupt::Registration registration;
    const WaitSpot::Stay stay;
  };

  StreamChannel& stream_channel(Rank peer);
  bool take_wake_up();
  // Returns kReady if a link can make progress with its interest; otherwise lists the items to
  // poll.
  PeerLink::Look prepare(std::span<const ChannelInterest> interests, os::Event* event);
  // Polls the listed items. Returns whether the caller can make progress now; nullopt if no item
  // became ready before the deadline.
  std::optional<bool> poll(Deadline deadline);
  // Opens at most one missing connection. Returns whether it tried to. If an attempt is due at a
  // later time, lowers `look_at` to that time.
  Result<bool> dial_missing(std::span<const ChannelInterest> interests, Deadline deadline,
                            Deadline& look_at);
  Status dial(const ChannelInterest& interest, Duration patience, Deadline deadline);

  const std::shared_ptr<TcpLinks> links_;  // shared with all groups of the process
  const StreamTransportOptions options_;
  os::Interrupt& interrupt_;
  WaitSpot spot_;
  std::atomic<bool> is_woken_{false};  // set by wake(), cleared by wait()
  // channels_[r] is the channel to rank r; null until it is needed.
  std::vector<std::unique_ptr<StreamChannel>> channels_;
  int num_looks_ = 0;  // the number of polls without a pause before wait() sleeps
  // These members belong to one wait(), but are kept to reuse their memory. items_ has one item for
  // each Polled, then one for the event.
  std::vector<PeerLink::Polled> polled_;
  std::vector<os::PollItem> items_;
};

}  // namespace cadre
