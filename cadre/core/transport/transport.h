// Ordered bytes between the ranks of a group: one Channel to each peer.
//
// Threads: a Transport belongs to one thread at a time (whoever holds the group's progress role);
// wake() may be called from any.
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
  // Returns the number of bytes taken, 0 .. data.size(). After 0, wait with want_send.
  virtual Result<size_t> try_send(ConstBytes data) = 0;
  // The two parts of a message, which are sent one behind the other.
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
  // Like try_send() for both parts, if possible in one piece.
  virtual Result<size_t> try_send_parts(const Parts& parts) {
    const auto sent = try_send(parts.head);
    if (!sent.ok() || *sent < parts.head.size()) return sent;
    const auto more = try_send(parts.body);
    if (!more.ok() && *sent == 0) return more;
    return *sent + (more.ok() ? *more : 0);
  }
  // Returns the number of bytes received, 0 .. buffer.size(). After 0, wait with want_recv.
  virtual Result<size_t> try_recv(Bytes buffer) = 0;
};

struct ChannelInterest {
  Rank peer;
  bool want_send = false;
  bool want_recv = false;
  // The caller handles what comes from the peer, but does not wait for it. If connections are
  // opened on first use, such an interest opens none to receive, and spends little time on opening
  // one to send.
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
  // try reports it.
  virtual Status wait(std::span<const ChannelInterest> interests, Deadline deadline) = 0;
  // Ends the wait() of another thread, or the next wait(), which then returns without an error, as
  // if there were progress. Never blocks; allowed under a mutex.
  virtual void wake() = 0;
};

}  // namespace cadre
