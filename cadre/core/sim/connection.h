// A simulated stream: two pipes of packets, one in each direction.
//
// Threads: the holder of the baton. Blocking: never.
// Lifetime: shared by the sockets of its two ends and the packets under way.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/shared_memory.h"
#include "cadre/core/os/socket.h"

namespace cadre::sim {

class Network;

// Side 0 connected, side 1 accepted.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  struct End {
    int rank = 0;
    os::Address address;
  };

  Connection(Network& network, std::array<End, 2> ends)
      : network_(network), ends_(std::move(ends)) {}

  const End& end(int side) const { return ends_[static_cast<size_t>(side)]; }

  Result<size_t> try_send(int side, ConstBytes data);
  Result<size_t> try_recv(int side, Bytes buffer);
  Result<bool> try_send_segment(int side, std::shared_ptr<os::SharedMemory> segment);
  // Null when none is there just now.
  Result<std::shared_ptr<os::SharedMemory>> try_recv_segment(int side);
  bool can_send(int side) const;
  bool can_recv(int side) const;
  // Neither end has ended it or found it reset.
  bool is_open() const;

  // Ends both directions of this side: what was sent still arrives, then the end.
  void shutdown(int side);
  // What close does: an end, or a reset when there is data that nobody will read.
  void close(int side);
  // Both ends find the connection reset, and what is under way is lost.
  void reset();

 private:
  struct Packet {
    std::vector<std::byte> bytes;
    std::shared_ptr<os::SharedMemory> segment;
    bool is_end = false;
    bool is_reset = false;
  };
  // What one side has sent and the other has not read yet.
  struct Pipe {
    std::deque<Packet> arrived;
    size_t num_consumed = 0;  // bytes of arrived.front() that were read
    size_t num_unread = 0;    // bytes under way or arrived
    TimePoint last_arrival;
    bool has_ended = false;  // the end has arrived
  };
  struct SideState {
    bool is_shut = false;    // by its own shutdown or close
    bool is_broken = false;  // a reset has arrived
  };

  Pipe& out_of(int side) { return pipes_[static_cast<size_t>(side)]; }
  Pipe& into(int side) { return pipes_[static_cast<size_t>(1 - side)]; }
  const Pipe& out_of(int side) const { return pipes_[static_cast<size_t>(side)]; }
  const Pipe& into(int side) const { return pipes_[static_cast<size_t>(1 - side)]; }
  SideState& state(int side) { return sides_[static_cast<size_t>(side)]; }
  const SideState& state(int side) const { return sides_[static_cast<size_t>(side)]; }

  void transmit(int side, Packet packet);
  void arrive(int side, uint64_t number, Packet packet);
  // After each change of what either end may wait for.
  void touch_ends();
  Status check_sendable(int side) const;
  // Why there is nothing more to read; ok when there may be more.
  Status check_readable(int side) const;
  Error describe(int side, std::string_view what) const;

  Network& network_;
  const std::array<End, 2> ends_;
  std::array<Pipe, 2> pipes_;  // pipe i carries what side i sends
  std::array<SideState, 2> sides_;
};

}  // namespace cadre::sim
