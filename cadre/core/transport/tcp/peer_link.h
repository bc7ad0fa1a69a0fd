// The connections between this process and one other, and the streams that share them.
//
// Threads: all methods from any thread. One mutex guards the state; it is held across system calls
// that do not block, never across one that does. Blocking: never.
// Lifetime: borrows the table of closed streams. Sockets are shared with the threads that poll
// them.
// Errors: kPeerLost if the connection on which the peer or this end sends has ended, or if the peer
// has closed the stream; kCorruption for frames that no process of this build sends, and for a peer
// that sends beyond a window. Both are final; what came before can still be received.
//
// One connection is enough. There are two if both processes opened one at the same time. Each end
// then reads from both, and always sends on the one that it could use first, so that a stream keeps
// its order. An accepted connection is used for sending once a frame has come on it, because until
// then the other end may have given up opening it. If it ends before that, this end opens a
// connection itself. The other end checks its connections whenever one more comes, and so notices
// if an earlier one was cut.
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

// The streams that were closed at this end. They are not opened again, and what still comes for
// them is dropped. Any thread may use it.
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
  // The bytes of one stream to and from this peer. The link's mutex guards it.
  struct Stream {
    explicit Stream(StreamId stream_id) : id(stream_id) {}

    const StreamId id;
    WaitSpot* spot = nullptr;  // belongs to the transport that opened the stream at this end
    bool is_closed_here = false;
    bool has_peer_closed = false;
    // The peer has left the group, and this rank awaits the peer's close of the stream.
    bool has_peer_left = false;
    wire::StreamBuffer unread;  // the bytes that came while no thread received them
    // The number of bytes that the last try_recv() asked for and that had not come.
    size_t num_expected = 0;
    size_t num_unread = 0;     // the number of payload bytes that were announced and not received
    size_t num_to_credit = 0;  // the number of received bytes for which the peer got no credit yet
    size_t window = wire::LinkFrame::kWindowBytes;  // the number of bytes that may still be sent
    // The number of bytes that were put into a frame, but not reported as sent.
    size_t num_promised = 0;
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
    std::shared_ptr<Stream> head;  // the stream of the frame that is being read
    bool has_received = false;     // a frame has come on this connection
    bool is_peers = false;         // the peer sends its streams on this connection
    bool cannot_send = false;      // a write has failed; what has come can still be read
    bool has_ended = false;
  };

  // A connection that a wait polls, and the interest for which it does.
  struct Polled {
    std::shared_ptr<Connection> connection;
    Stream* stream;
    ChannelInterest interest;
    PeerLink* link;
  };

  PeerLink(int rank, int peer, const ClosedStreams& closed, LinkMeter& meter)
      : peer_(peer), closed_(closed), meter_(meter), dials_(rank > peer) {}

  // Opens the stream. The spot is notified when another thread finds something for the stream,
  // until detach().
  std::shared_ptr<Stream> open(StreamId id, WaitSpot& spot);
  // Ends the notifications for the stream. Never throws: the spot is about to end.
  void detach(StreamId id) noexcept;
  // Closes the stream and tells the peer, also if it was never opened here. REQUIRES: `closed` has
  // it.
  void close(StreamId id);
  // Called when the peer has left the stream's group. The stream ends now if there is no connection
  // on which something could still come, and else with the peer's close, for which a probe asks.
  // REQUIRES: the stream was opened here.
  void note_left(StreamId id);
  void add(std::unique_ptr<os::Socket> socket, ConnectionEnd end);

  // Do the same as Channel's methods, but their errors do not name the ranks.
  Result<size_t> try_send(Stream& stream, const Channel::Parts& data);
  Result<size_t> try_recv(Stream& stream, Bytes buffer);

  enum class Look : uint8_t {
    kReady,        // there can be progress without waiting
    kWait,         // the connections to poll were appended
    kUnconnected,  // like kWait, but there is no connection to send on: see plan_dial()
  };
  Look prepare_wait(Stream& stream, const ChannelInterest& interest, std::vector<Polled>& polled,
                    std::vector<os::PollItem>& items);
  // Called after the poll. Returns whether there can be progress now. Also receives what came for
  // other streams.
  bool handle_ready(const Polled& polled, const os::PollItem& item);

  // Returns whether the caller is to open a connection. After kNow no other caller does, until
  // end_dial().
  DialTurn plan_dial(const ChannelInterest& interest, TimePoint now);
  // Ends an attempt. `socket` is null if no connection was opened in time; another attempt may
  // follow after a while.
  void end_dial(std::unique_ptr<os::Socket> socket, TimePoint now);
  // Called if a connection cannot be opened. Ends the link, unless the peer has opened one
  // meanwhile.
  void fail(const Error& error, TimePoint now);

  // Sends what is left to be sent, and reads what comes. Returns 0 once everything has left this
  // host.
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
  // Returns how many promised bytes the kernel has taken and no call has reported as sent, and
  // counts them as reported.
  size_t take_gone(Stream& stream, size_t num_offered);
  Result<size_t> send_new(Stream& stream, Channel::Parts data);
  size_t take_unread(Stream& stream, Bytes buffer);
  Result<size_t> receive_from(Connection& connection, Stream& stream, Bytes buffer);
  Result<size_t> take_head(Connection& connection, Bytes buffer);
  // Reads once. Payload of `receiver` stays in the reader's buffer if no earlier bytes of it are
  // unread.
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
  // Is null until there is a connection on which this rank can send.
  std::shared_ptr<Connection> sending_;
  // A stream is shared with its channel, and with a connection that is in the middle of one of its
  // frames.
  std::map<StreamId, std::shared_ptr<Stream>> streams_;
  std::optional<Error> send_error_;
  std::optional<Error> recv_error_;
  DialSchedule dials_;
};

}  // namespace cadre
