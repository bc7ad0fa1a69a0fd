// The connections between this process and one other, and the streams that share them.
//
// Threads: all methods from any thread; one mutex guards the state and is held across system calls
// that do not block, never across one that does. Blocking: never.
// Lifetime: borrows the table of closed streams. Sockets are shared with the threads that poll
// them. Errors: kPeerLost when the connection has ended that the peer, or this end, sends on, or
// the peer has closed the stream; kCorruption for frames that no process of this build sends, and
// for a peer that sends beyond a window. Both are for good; what came before can still be received.
//
// One connection is enough. There are two when both processes opened one at the same time: each end
// reads from both, and sends on the one that was usable first, always the same, so that a stream
// keeps its order. An accepted connection is used for sending once a frame has come on it, because
// until then the other end may have given up opening it. If it ends before, this end opens one, and
// the other end, which looks at its connections when one more comes, ends them all if one was cut.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/transport/stream_id.h"
#include "cadre/core/transport/tcp/dial_schedule.h"
#include "cadre/core/transport/tcp/frame_reader.h"
#include "cadre/core/transport/tcp/frame_writer.h"
#include "cadre/core/transport/tcp/wait_spot.h"
#include "cadre/core/transport/transport.h"
#include "cadre/core/wire/stream_buffer.h"

namespace cadre {

enum class ConnectionEnd : uint8_t { kDialed, kAccepted };

// The streams that were closed here, which are not opened again: what still comes of them is
// dropped. Threads: any.
class ClosedStreams {
 public:
  void add(StreamId id) {
    const std::lock_guard lock(mutex_);
    ids_.insert(id);
  }
  bool contains(StreamId id) const {
    const std::lock_guard lock(mutex_);
    return ids_.contains(id);
  }

 private:
  mutable std::mutex mutex_;
  std::set<StreamId> ids_;
};

class PeerLink {
 public:
  // One direction and its opposite of a group's bytes, with this peer. Guarded by the link.
  struct Stream {
    explicit Stream(StreamId stream_id) : id(stream_id) {}

    const StreamId id;
    WaitSpot* spot = nullptr;  // spot of the transport that opened the stream here
    bool is_closed_here = false;
    bool has_peer_closed = false;
    bool has_peer_left = false;  // the group, and its close is awaited
    wire::StreamBuffer unread;   // what came while nobody received it
    size_t num_expected = 0;     // bytes that were asked for last and had not come
    size_t num_unread = 0;       // payload bytes that were announced and not received
    size_t num_to_credit = 0;    // received bytes that the peer was not told of
    size_t window = wire::LinkFrame::kWindowBytes;  // bytes that may still be sent
    size_t num_promised = 0;  // bytes that were put into a frame, but not reported as sent
  };

  struct Connection {
    Connection(std::unique_ptr<os::Socket> connected, ConnectionEnd connection_end,
               LinkMeter& meter)
        : socket(std::move(connected)),
          writer(*socket, meter),
          reader(*socket),
          end(connection_end) {}

    const std::unique_ptr<os::Socket> socket;
    FrameWriter writer;
    FrameReader reader;
    const ConnectionEnd end;
    std::shared_ptr<Stream> head;  // stream of the frame being read
    bool has_received = false;     // a frame
    bool is_peers = false;         // the peer sends its streams on it
    bool cannot_send = false;      // a write has failed; what has come can still be read
    bool has_ended = false;
  };

  // A connection that a wait polls, and what for.
  struct Polled {
    std::shared_ptr<Connection> connection;
    Stream* stream;
    ChannelInterest interest;
    PeerLink* link;
  };

  PeerLink(int rank, int peer, const ClosedStreams& closed, LinkMeter& meter)
      : peer_(peer), closed_(closed), meter_(meter), dials_(rank > peer) {}

  // The spot is notified when another thread finds something for the stream, until close().
  std::shared_ptr<Stream> open(StreamId id, WaitSpot& spot);
  // From now on nobody is notified for the stream. Never throws: the spot is about to end.
  void detach(StreamId id) noexcept;
  // Also of a stream that was never opened here. REQUIRES: `closed` has it.
  void close(StreamId id);
  // The peer has left the stream's group: the stream ends now if there is no connection on which
  // something could still come, and else with the peer's close, which it is asked for.
  // REQUIRES: the stream was opened here.
  void note_left(StreamId id);
  void add(std::unique_ptr<os::Socket> socket, ConnectionEnd end);

  // As Channel, without the names of the ranks.
  Result<size_t> try_send(Stream& stream, const Channel::Parts& data);
  Result<size_t> try_recv(Stream& stream, Bytes buffer);

  enum class Look : uint8_t {
    kReady,        // there can be progress without waiting
    kWait,         // what to poll was appended
    kUnconnected,  // as kWait, and there is no connection to send on: see plan_dial()
  };
  Look prepare_wait(Stream& stream, const ChannelInterest& interest, std::vector<Polled>& polled,
                    std::vector<os::PollItem>& items);
  // After the poll: whether there can be progress now. Takes what came for other streams.
  bool handle_ready(const Polled& polled, const os::PollItem& item);

  // Whether the caller is to open a connection: kNow makes it the one that does, until end_dial().
  DialTurn plan_dial(const ChannelInterest& interest, TimePoint now);
  // With no socket: it could not be opened in time, but may be tried again after a while.
  void end_dial(std::unique_ptr<os::Socket> socket, TimePoint now);
  // It cannot be opened: the end of the link, unless the peer has opened one meanwhile.
  void fail(const Error& error, TimePoint now);

  // Sends what is left to be sent, and drops what comes; the bytes that have not left yet.
  size_t drain();

 private:
  using Connections = std::vector<std::shared_ptr<Connection>>;

  std::shared_ptr<Stream>& find_or_add(StreamId id);
  void look_for_first_frame();
  void look_for_end();
  void receive_what_is_there(Connection& connection);
  void send_on(std::shared_ptr<Connection> connection);
  void end_if_unconnected(Stream& stream);
  bool can_send(const Stream& stream) const;
  bool has_come(const Polled& polled) const;
  // Promised bytes that the kernel has taken and no call has reported as sent yet.
  size_t take_gone(Stream& stream, size_t num_offered);
  Result<size_t> send_new(Stream& stream, Channel::Parts data);
  size_t take_unread(Stream& stream, Bytes buffer);
  Result<size_t> receive_from(Connection& connection, Stream& stream, Bytes buffer);
  Result<size_t> take_head(Connection& connection, Bytes buffer);
  // The first payload of the receiver, if it is one, is left where it was read.
  Result<size_t> receive_any(Connection& connection, const Stream* receiver);
  Status handle_frames(Connection& connection, const Stream* receiver);
  Status handle(Connection& connection, const wire::LinkFrame& frame);
  Status handle_data(Connection& connection, const wire::LinkFrame& frame);
  Status handle_credit(const wire::LinkFrame& frame);
  Status handle_close(StreamId id);
  void count_received(Stream& stream, size_t num_bytes);
  void send_frame(wire::LinkFrame::Kind kind, StreamId id, size_t length);
  // Sends what is queued on the connection.
  void flush(Connection& connection);
  void end_sending(Connection& connection, const Error& error);
  void end(Connection& connection, const Error& error);
  void notify_all();
  Error error_of_closed(const Stream& stream) const;

  const int peer_;
  const ClosedStreams& closed_;
  LinkMeter& meter_;

  std::mutex mutex_;
  Connections connections_;
  std::shared_ptr<Connection> sending_;  // null until one is usable
  // Shared with channels, and with a connection in the middle of a frame of it.
  std::map<StreamId, std::shared_ptr<Stream>> streams_;
  std::optional<Error> send_error_;
  std::optional<Error> recv_error_;
  DialSchedule dials_;
};

}  // namespace cadre
