// The sending half of a data connection. It sends frames of many streams and finishes each frame
// that it has begun.
//
// Threads: one at a time. Blocking: never. Lifetime: borrows the socket.
// Errors: those of the socket, which is useless then.
// Payload goes from the caller's memory to the kernel, several frames in one system call. The rest
// of a frame that the kernel takes only in part is copied and sent before everything else. So a
// stream that ends, or sends no more, never stops the others. That rest counts as sent only once
// the kernel has taken it; until then its stream offers the same bytes again.
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

// The totals of a process's data connections. Handshakes are not counted.
struct LinkCounters {
  // The number of connections that were added; either end may have opened them.
  uint64_t connections = 0;
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
};

// The same counters while threads change them.
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
    size_t num_kept = 0;   // the number of payload bytes behind these that were copied
  };

  // REQUIRES: the meter outlives the writer.
  FrameWriter(os::Socket& socket, LinkMeter& meter) : socket_(socket), meter_(meter) {}

  // Queues a frame without payload. The next send() or flush() sends it.
  void queue(const wire::LinkFrame& frame);
  // Sends as many queued bytes as the kernel takes now.
  Status flush();
  bool is_flushed() const { return outbox_.empty(); }
  // Sends the head, then the body, as one payload.
  Result<Sent> send(StreamId stream, const Channel::Parts& payload);
  // Returns how many payload bytes send() kept for the stream and the kernel has not taken yet.
  size_t num_kept(StreamId stream) const;

 private:
  using Pieces = std::array<ConstBytes, 3>;  // the consecutive pieces of a frame

  // Counts a frame of which the kernel has taken bytes; returns how many of them are this frame's.
  size_t count_frame(StreamId stream, const Pieces& frame, size_t num_moved, Sent& sent);
  void consume(size_t num_bytes);
  void keep_rest(StreamId stream, const Pieces& frame, size_t num_moved);

  os::Socket& socket_;
  LinkMeter& meter_;
  wire::StreamBuffer outbox_;  // holds the rest of a frame that was cut, then queued frames
  StreamId cut_stream_;        // the stream of the frame that was cut
  size_t cut_left_ = 0;        // the number of bytes of that frame in the outbox
  // The number of payload bytes of that frame that were not taken when it was cut.
  size_t cut_payload_ = 0;
};

}  // namespace cadre
