// The sending half of a data connection: frames of many streams, none of them ever left unfinished.
//
// Threads: one at a time. Blocking: never. Lifetime: borrows the socket.
// Errors: of the socket; it is useless then.
// Payload goes from the caller's memory to the kernel, several frames in one system call. The rest
// of a frame that the kernel takes only in part is copied and goes ahead of everything else, so
// that a stream that ends, or just sends nothing more, never stops the others. That rest counts as
// sent only once the kernel has it: until then its stream offers the same bytes again.
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

// What a process's data connections have done so far. Handshakes are not counted.
struct LinkCounters {
  uint64_t connections = 0;  // that were added, opened by either end
  uint64_t frames_sent = 0;
  uint64_t bytes_sent = 0;
};

// The same, while they change.
struct LinkMeter {
  std::atomic<uint64_t> connections{0};
  std::atomic<uint64_t> frames_sent{0};
  std::atomic<uint64_t> bytes_sent{0};

  LinkCounters read() const { return {connections, frames_sent, bytes_sent}; }
};

class FrameWriter {
 public:
  struct Sent {
    size_t num_taken = 0;  // payload bytes that the kernel has
    size_t num_kept = 0;   // payload bytes behind them that were copied
  };

  // The meter outlives it.
  FrameWriter(os::Socket& socket, LinkMeter& meter) : socket_(socket), meter_(meter) {}

  // A frame without payload. It goes with what is sent next, or with flush().
  void queue(const wire::LinkFrame& frame);
  // As far as the kernel takes bytes just now.
  Status flush();
  bool is_flushed() const { return outbox_.empty(); }
  // The head, then the body, as one payload.
  Result<Sent> send(StreamId stream, const Channel::Parts& payload);
  // Payload bytes that send() kept for the stream and the kernel has not taken yet.
  size_t num_kept(StreamId stream) const;

 private:
  using Pieces = std::array<ConstBytes, 3>;  // the consecutive pieces of a frame

  // Counts a frame of which the kernel has taken bytes; returns how many of them are this frame's.
  size_t count_frame(StreamId stream, const Pieces& frame, size_t num_moved, Sent& sent);
  void consume(size_t num_bytes);
  void keep_rest(StreamId stream, const Pieces& frame, size_t num_moved);

  os::Socket& socket_;
  LinkMeter& meter_;
  wire::StreamBuffer outbox_;  // the rest of a frame that was cut, then queued frames
  StreamId cut_stream_;        // stream of the cut frame
  size_t cut_left_ = 0;        // bytes of it in the outbox
  size_t cut_payload_ = 0;     // payload bytes of that frame not taken when it was cut
};

}  // namespace cadre
