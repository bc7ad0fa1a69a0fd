// Ordered bytes between the ranks of a group: one Channel to each peer.
//
// Threads: a Transport belongs to one thread at a time (whoever holds the group's progress role);
// wake() may be called from any.
// Blocking: only wait(). Lifetime: channels live as long as their Transport.
// Errors: kPeerLost with the peer's stream ended, kAborted when the Interrupt is raised, kTimeout.
#pragma once

#include <algorithm>
#include <span>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"

namespace cadre {

// Ordered bytes to and from one peer, full duplex. Never blocks.
class Channel {
 public:
  virtual ~Channel() = default;
  // Bytes taken, 0 .. data.size(); 0 means: wait for can_send.
  virtual Result<size_t> try_send(ConstBytes data) = 0;
  // The same of a message's two parts, one behind the other, where possible in one piece.
  struct Parts {
    ConstBytes head;
    ConstBytes body;

    size_t size() const { return head.size() + body.size(); }
    // Cuts the first bytes off, as many as there are.
    Parts take_first(size_t at_most) {
      const size_t of_head = std::min(at_most, head.size());
      const size_t of_body = std::min(at_most - of_head, body.size());
      const Parts taken{head.first(of_head), body.first(of_body)};
      head = head.subspan(of_head);
      body = body.subspan(of_body);
      return taken;
    }
  };
  virtual Result<size_t> try_send_parts(const Parts& parts) {
    const auto sent = try_send(parts.head);
    if (!sent.ok() || *sent < parts.head.size()) return sent;
    const auto more = try_send(parts.body);
    if (!more.ok() && *sent == 0) return more;
    return *sent + (more.ok() ? *more : 0);
  }
  // Bytes received, 0 .. buffer.size(); 0 means: wait for can_recv.
  virtual Result<size_t> try_recv(Bytes buffer) = 0;
};

struct ChannelInterest {
  Rank peer;
  bool want_send = false;
  bool want_recv = false;
  // What comes from the peer is welcome, but the wait is not for it: where connections are made on
  // first use, it is worth little time of connecting to send to this peer, and none to receive.
  bool is_optional = false;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual Rank rank() const = 0;
  virtual int world_size() const = 0;
  // REQUIRES: peer != rank().
  virtual Channel& channel(Rank peer) = 0;
  // Until one of the interests can make progress. kTimeout at the deadline, kAborted when the group
  // was interrupted; a broken channel counts as progress, so that the next try reports it.
  virtual Status wait(std::span<const ChannelInterest> interests, Deadline deadline) = 0;
  // Ends the wait() of another thread, or the next one: it returns well, as if there were progress.
  // Never blocks; allowed under a mutex.
  virtual void wake() = 0;
};

}  // namespace cadre
