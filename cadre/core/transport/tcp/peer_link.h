// The data connections between this process and one peer, and the streams that share them.
//
// Threads: any thread may call all methods. One mutex guards the state; it is held only during
// system calls that do not block. Blocking: never.
// Lifetime: borrows the table of closed streams. Sockets are shared with the threads that poll
// them.
// Errors: kPeerLost if the connection over which the peer or this process sends has ended, or if
// the peer has closed the stream; kCorruption for invalid frames and for a peer that sends more
// than its window allows. After either error no more bytes can be sent; bytes that arrived before
// it can still be received.
//
// Usually there is one connection. There are two if both processes opened one at the same time.
// Each process reads from both, and always sends over the connection that it could use first, so
// that the bytes of a stream stay in order. An accepted connection is used for sending only after a
// frame has come over it, because the peer may give up opening it before that. If an accepted
// connection ends before its first frame, this process opens a connection itself. A process that
// accepts another connection checks its earlier ones, and so detects one that was cut.
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

// The streams that were closed at this end. They are never opened again, and bytes that arrive for
// them are dropped. Any thread may use this class.
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
  // The state of one stream to and from this peer. The mutex of the link guards it.
  struct Stream {
    explicit Stream(StreamId stream_id) : id(stream_id) {}

    const StreamId id;
    // Notified when bytes, credit or an end arrive for the stream. Owned by the transport that has
    // the stream open at this end; null if no transport has.
    WaitSpot* spot = nullptr;
    bool is_closed_here = false;
    bool has_peer_closed = false;
    // The control plane has reported that the peer left the group. This process waits for the
    // peer's close of the stream.
    bool has_peer_left = false;
    wire::StreamBuffer unread;  // the bytes that arrived while no thread called try_recv()
    // The size of the buffer of the last try_recv().
    size_t num_expected = 0;
    // The number of payload bytes in received headers that try_recv() has not returned.
    size_t num_unread = 0;
    size_t num_to_credit =
        0;  // the bytes returned by try_recv() that were not credited to the peer yet
    // The number of bytes that may be sent before the peer gives more credit.
    size_t window = wire::LinkFrame::kWindowBytes;
    // The number of bytes of a partly sent frame that try_send() has not yet reported as sent.
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
    bool has_received = false;     // a frame has arrived over this connection
    bool is_peers = false;         // the peer sends its streams over this connection
    bool cannot_send = false;      // a write has failed; bytes that have arrived can still be read
    bool has_ended = false;
  };

  // A connection that a wait() polls, with the stream and the interest for which it is polled.
  struct Polled {
    std::shared_ptr<Connection> connection;
    Stream* stream;
    ChannelInterest interest;
    PeerLink* link;
  };

  PeerLink(int rank, int peer, const ClosedStreams& closed, LinkMeter& meter)
      : peer_(peer), closed_(closed), meter_(meter), dials_(rank > peer) {}

  // Opens the stream. Until detach(), `spot` is notified when another thread has received bytes,
  // credit or an end for the stream.
  std::shared_ptr<Stream> open(StreamId id, WaitSpot& spot);
  // Ends the notifications for the stream. Never throws, because the spot is destroyed next.
  void detach(StreamId id) noexcept;
  // Closes the stream and sends a close frame to the peer. The stream need not have been opened
  // here. REQUIRES: the ClosedStreams have the id.
  void close(StreamId id);
  // Called when the peer has left the stream's group. If there is no connection, the stream ends
  // now. Otherwise bytes may still be in flight, so the stream ends with the peer's close frame,
  // which a probe frame requests. REQUIRES: the stream was opened here.
  void note_left(StreamId id);
  void add(std::unique_ptr<os::Socket> socket, ConnectionEnd end);

  // These methods work like those of Channel, but their errors do not name the ranks.
  Result<size_t> try_send(Stream& stream, const Channel::Parts& data);
  Result<size_t> try_recv(Stream& stream, Bytes buffer);

  enum class Look : uint8_t {
    kReady,        // the caller can make progress without waiting
    kWait,         // the caller must wait; the connections to poll were appended
    kUnconnected,  // like kWait, but there is no connection to send over: see plan_dial()
  };
  Look prepare_wait(Stream& stream, const ChannelInterest& interest, std::vector<Polled>& polled,
                    std::vector<os::PollItem>& items);
  // Called after a poll of the items from prepare_wait(). Returns whether the caller can make
  // progress now. Also receives bytes that arrived for other streams.
  bool handle_ready(const Polled& polled, const os::PollItem& item);

  // Returns whether and when the caller has to open a connection. After the result kNow, no other
  // caller gets kNow until end_dial().
  DialTurn plan_dial(const ChannelInterest& interest, TimePoint now);
  // Called after an attempt to open a connection. `socket` is null if the attempt timed out;
  // another one may follow after a pause.
  void end_dial(std::unique_ptr<os::Socket> socket, TimePoint now);
  // Called if a connection cannot be opened. The link fails with `error`, unless the peer has
  // opened a connection in the meantime.
  void fail(const Error& error, TimePoint now);

  // Sends pending bytes and receives those that have arrived, without blocking. Returns 0 once all
  // bytes have left this host.
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
  // Returns how many bytes of a partly sent frame the kernel has taken since the last report, at
  // most `num_offered`. Counts them as reported.
  size_t take_gone(Stream& stream, size_t num_offered);
  Result<size_t> send_new(Stream& stream, Channel::Parts data);
  size_t take_unread(Stream& stream, Bytes buffer);
  Result<size_t> receive_from(Connection& connection, Stream& stream, Bytes buffer);
  Result<size_t> take_head(Connection& connection, Bytes buffer);
  // Reads once from the connection. Payload for the stream `receiver` stays in the reader's buffer,
  // unless earlier bytes of that stream are unread.
  Result<size_t> receive_any(Connection& connection, const Stream* receiver);
  Status handle_frames(Connection& connection, const Stream* receiver);
  Status handle(Connection& connection, const wire::LinkFrame& frame);
  Status handle_data(Connection& connection, const wire::LinkFrame& frame);
  Status handle_credit(const wire::LinkFrame& frame);
  Status handle_close(StreamId id);
  void count_received(Stream& stream, size_t num_bytes);
  void send_frame(wire::LinkFrame::Kind kind, StreamId id, size_t length);
  // Sends the queued frames of the connection.
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
  // The connection over which this process sends; null before it can use one.
  std::shared_ptr<Connection> sending_;
  // A stream is shared with its channel, and with a connection that is receiving one of its frames.
  std::map<StreamId, std::shared_ptr<Stream>> streams_;
  std::optional<Error> send_error_;
  std::optional<Error> recv_error_;
  DialSchedule dials_;
};

}  // namespace cadre
