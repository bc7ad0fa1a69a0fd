// The Transport of one group over the TcpLinks of its process.
//
// Threads, blocking and errors are those of tcp_links.h. Private to tcp/.
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
    const std::shared_ptr<PeerLink::Stream> stream_;  // the link shares it
  };

  // The registrations that wake a sleeping thread.
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
  // Asks the links about the interests. Returns the best of their answers and lists the items to
  // poll.
  PeerLink::Look prepare(std::span<const ChannelInterest> interests, os::Event* event);
  // Returns whether there can be progress now; nullopt if nothing happened until the deadline.
  std::optional<bool> poll(Deadline deadline);
  // Opens at most one connection, and returns whether it tried. If an attempt is due later,
  // `look_at` becomes no later than that.
  Result<bool> dial_missing(std::span<const ChannelInterest> interests, Deadline deadline,
                            Deadline& look_at);
  Status dial(const ChannelInterest& interest, Duration patience, Deadline deadline);

  const std::shared_ptr<TcpLinks> links_;  // all groups of the process share it
  const StreamTransportOptions options_;
  os::Interrupt& interrupt_;
  WaitSpot spot_;
  std::atomic<bool> is_woken_{false};  // wake() sets it, wait() clears it
  // channels_[r] is the channel to rank r; null until it is needed.
  std::vector<std::unique_ptr<StreamChannel>> channels_;
  int num_looks_ = 0;  // the number of polls before wait() sleeps
  // These members are kept between waits to reuse their memory: one item for each Polled, then the
  // event.
  std::vector<PeerLink::Polled> polled_;
  std::vector<os::PollItem> items_;
};

}  // namespace cadre
