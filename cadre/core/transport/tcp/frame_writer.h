// The sending half of a data connection. It sends frames of many streams. A frame that was begun is
// always completed before the next one.
//
// Threads: one at a time. Blocking: never. Lifetime: borrows the socket.
// Errors: those of the socket. After an error the socket is unusable.
// Payload is passed to the kernel from the caller's memory, several frames in one system call. If
// the kernel takes a frame only in part, the rest is copied and sent before all other bytes. So
// other streams can continue even if that stream ends or sends no more. The copied rest counts as
// sent only after the kernel has taken it; until then the caller passes the same bytes again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/socket.h"
#include "cadre/core/transport/stream_id.h"
#include "cadre/core/transport/transport.h"
#include "cadre/core/wire/link_frame.h"
#include "cadre/core/wire/stream_buffer.h"

namespace cadre {

// Totals of all data connections of a process. The bytes of handshakes are not counted.
struct LinkCounters {
  // The number of connections, whether this process or the peer opened them.
  uint64_t connections = 0;
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
};

// The counters of LinkCounters as atomics, which several threads increment.
struct LinkMeter {
  std::atomic<uint64_t> connections{0};
  std::atomic<uint64_t> frames_sent{0};
  std::atomic<uint64_t> bytes_sent{0};

  LinkCounters read() const { return {connections, frames_sent, bytes_sent}; }
};

class FrameWriter {
 public:
  struct Sent {
    size_t num_taken = 0;  // the number of payload bytes that the kernel has taken
    size_t num_kept = 0;   // the number of payload bytes after these that were copied
  };

  // REQUIRES: the meter outlives the writer.
  FrameWriter(os::Socket& socket, LinkMeter& meter) : socket_(socket), meter_(meter) {}

  // Queues a frame without payload. The next send() or flush() sends it.
  void queue(const wire::LinkFrame& frame);
  // Sends as many queued bytes as the kernel takes now.
  Status flush();
  bool is_flushed() const { return outbox_.empty(); }
  // Sends `payload.head`, then `payload.body`, as one payload.
  Result<Sent> send(StreamId stream, const Channel::Parts& payload);
  // Returns how many payload bytes of the stream send() has copied and the kernel has not taken
  // yet.
  size_t num_kept(StreamId stream) const;

 private:
  // The pieces of one frame: its header, its part of `payload.head`, its part of `payload.body`.
  using Pieces = std::array<ConstBytes, 3>;

  // Counts a frame from which the kernel has taken bytes. Returns how many of the `num_moved` bytes
  // belong to this frame.
  size_t count_frame(StreamId stream, const Pieces& frame, size_t num_moved, Sent& sent);
  void consume(size_t num_bytes);
  void keep_rest(StreamId stream, const Pieces& frame, size_t num_moved);

  os::Socket& socket_;
  LinkMeter& meter_;
  wire::StreamBuffer outbox_;  // the rest of a partly sent frame, then queued frames
  StreamId cut_stream_;        // the stream of the partly sent frame
  size_t cut_left_ = 0;        // the number of bytes of the partly sent frame in outbox_
  // The number of payload bytes in the rest of the partly sent frame when it was copied to outbox_.
  size_t cut_payload_ = 0;
};

}  // namespace cadre
