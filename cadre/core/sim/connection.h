// A simulated stream: two pipes of packets, one in each direction.
//
// Threads: the one that the simulator runs. Blocking: never.
// Lifetime: shared by the sockets of its two ends and the packets in flight.
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

// Side 0 is the connecting side, side 1 the accepting one.
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
  // Returns the next segment; null if none has arrived.
  Result<std::shared_ptr<os::SharedMemory>> try_recv_segment(int side);
  bool can_send(int side) const;
  bool can_recv(int side) const;
  // Returns whether neither end has ended the connection or found it reset.
  bool is_open() const;

  // Shuts down both directions of this side: the other side still receives what was sent, and then
  // the end of the stream.
  void shutdown(int side);
  // Closes the connection as the kernel does: with the end of the stream, or with a reset if
  // received data was not read.
  void close(int side);
  // Resets the connection: both ends find it broken, and packets in flight are lost.
  void reset();

 private:
  struct Packet {
    std::vector<std::byte> bytes;
    std::shared_ptr<os::SharedMemory> segment;
    bool is_end = false;
    bool is_reset = false;
  };
  // The data that one side has sent and the other has not yet read.
  struct Pipe {
    std::deque<Packet> arrived;
    size_t num_consumed = 0;  // the number of bytes of arrived.front() that were read
    size_t num_unread = 0;    // the number of bytes that are in flight or have arrived
    TimePoint last_arrival;
    bool has_ended = false;  // the end of the stream has arrived
  };
  struct SideState {
    bool is_shut = false;    // this side has called shutdown() or close()
    bool is_broken = false;  // a reset has arrived at this side
  };

  Pipe& out_of(int side) { return pipes_[static_cast<size_t>(side)]; }
  Pipe& into(int side) { return pipes_[static_cast<size_t>(1 - side)]; }
  const Pipe& out_of(int side) const { return pipes_[static_cast<size_t>(side)]; }
  const Pipe& into(int side) const { return pipes_[static_cast<size_t>(1 - side)]; }
  SideState& state(int side) { return sides_[static_cast<size_t>(side)]; }
  const SideState& state(int side) const { return sides_[static_cast<size_t>(side)]; }

  void transmit(int side, Packet packet);
  void arrive(int side, uint64_t number, Packet packet);
  // Makes the scheduler check again what the ranks at both ends wait for. Called after each change
  // of the connection.
  void touch_ends();
  Status check_sendable(int side) const;
  // Returns why there is nothing more to read; ok if there may be more.
  Status check_readable(int side) const;
  Error describe(int side, std::string_view what) const;

  Network& network_;
  const std::array<End, 2> ends_;
  std::array<Pipe, 2> pipes_;  // pipe i carries the bytes that side i sends
  std::array<SideState, 2> sides_;
};

}  // namespace cadre::sim
