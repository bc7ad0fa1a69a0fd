// A Transport over connected stream sockets, one for each peer.
//
// Threads: as every Transport, one thread at a time. Blocking: only wait(); it looks a few times
// before it sleeps, because waking up costs more than most messages.
// Lifetime: owns the sockets; the System and the Interrupt outlive it.
// Errors: kPeerLost when a stream has ended or was reset, with both ranks and addresses; kAborted
// and kTimeout from wait(). Bytes go from the caller's memory to the kernel and back, with no
// buffer of its own in between.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cadre/os/interrupt.h"
#include "cadre/os/socket.h"
#include "cadre/os/system.h"
#include "cadre/transport/transport.h"

namespace cadre {

struct TcpTransportOptions {
  Rank rank = 0;
  // More ranks than cores on this host: waiting gives the core away instead of looking again.
  bool crowded = false;
};

class TcpTransport final : public Transport {
 public:
  // `peers` has one connected socket for each rank of the group, and null at `rank`.
  TcpTransport(os::System& system, os::Interrupt& interrupt, const TcpTransportOptions& options,
               std::vector<std::unique_ptr<os::Socket>> peers);

  Rank rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(channels_.size()); }
  Channel& channel(Rank peer) override;
  Status wait(std::span<const ChannelInterest> interests, Deadline deadline) override;
  void wake() override { wake_up_->notify(); }

 private:
  class TcpChannel final : public Channel {
   public:
    TcpChannel(Rank rank, Rank peer, std::unique_ptr<os::Socket> socket)
        : rank_(rank), peer_(peer), socket_(std::move(socket)) {}

    Result<size_t> try_send(ConstBytes data) override;
    Result<size_t> try_recv(Bytes buffer) override;
    os::Socket& socket() const { return *socket_; }

   private:
    Error named(const Error& error) const;

    Rank rank_;
    Rank peer_;
    std::unique_ptr<os::Socket> socket_;
  };

  bool is_ready_soon();

  os::System& system_;
  os::Interrupt& interrupt_;
  Rank rank_;
  const bool is_crowded_;
  const std::unique_ptr<os::Event> wake_up_;
  std::vector<std::optional<TcpChannel>> channels_;  // by rank, none at rank_
  std::vector<os::PollItem> items_;                  // of the current wait, kept for its memory
  int num_looks_ = 0;                                // polls without sleeping before one sleeps
};

}  // namespace cadre
