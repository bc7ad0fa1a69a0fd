// Ordered bytes between the ranks of a group: one Channel to each peer.
//
// Threads: one thread at a time uses a Transport (the thread that holds the group's progress role,
// that is, the right to run its I/O); wake() may be called from any thread.
// Blocking: only wait(). Lifetime: channels live as long as their Transport.
// Errors: kPeerLost if the peer's stream has ended, kAborted if the Interrupt is raised, kTimeout.
#pragma once

#include <algorithm>
#include <span>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"

namespace cadre {

// A stream of ordered bytes to and from one peer. Its calls never block.
class Channel {
 public:
  virtual ~Channel() = default;
  // Sends as many bytes as possible without blocking. Returns their number, 0 .. data.size(). If it
  // is 0, the caller should wait() with want_send.
  virtual Result<size_t> try_send(ConstBytes data) = 0;
  // The two parts of a message, for example a header and a payload: `body` is sent directly after
  // `head`.
  struct Parts {
    ConstBytes head;
    ConstBytes body;

    size_t size() const { return head.size() + body.size(); }
    // Removes the first `at_most` bytes, or as many as there are, and returns them.
    Parts take_first(size_t at_most) {
      const size_t of_head = std::min(at_most, head.size());
      const size_t of_body = std::min(at_most - of_head, body.size());
      const Parts taken{head.first(of_head), body.first(of_body)};
      head = head.subspan(of_head);
      body = body.subspan(of_body);
      return taken;
    }
  };
  // Sends both parts like try_send(), if possible in one system call.
  virtual Result<size_t> try_send_parts(const Parts& parts) {
    const auto sent = try_send(parts.head);
    if (!sent.ok() || *sent < parts.head.size()) return sent;
    const auto more = try_send(parts.body);
    if (!more.ok() && *sent == 0) return more;
    return *sent + (more.ok() ? *more : 0);
  }
  // Receives bytes that have arrived. Returns their number, 0 .. buffer.size(). If it is 0, the
  // caller should wait() with want_recv.
  virtual Result<size_t> try_recv(Bytes buffer) = 0;
};

struct ChannelInterest {
  Rank peer;
  bool want_send = false;
  bool want_recv = false;
  // True if the operation does not depend on this peer, and the caller only handles bytes that
  // arrive from it. For an optional interest the transport opens no connection to receive, and soon
  // gives up opening one to send.
  bool is_optional = false;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual Rank rank() const = 0;
  virtual int world_size() const = 0;
  // REQUIRES: peer != rank().
  virtual Channel& channel(Rank peer) = 0;
  // Waits until one of the interests can make progress. Returns kTimeout at the deadline and
  // kAborted if the group was interrupted. A broken channel counts as progress, so that the next
  // try_send() or try_recv() returns its error.
  virtual Status wait(std::span<const ChannelInterest> interests, Deadline deadline) = 0;
  // Makes the current wait() of another thread return without an error, as if there were progress.
  // If no thread waits, the next wait() returns so. Never blocks; may be called while a mutex is
  // held.
  virtual void wake() = 0;
};

}  // namespace cadre
