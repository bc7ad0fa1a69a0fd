// The data connections of one process over TCP: usually one to each peer. They are opened on first
// use, and the streams of all groups of the process share them.
//
// Threads: any thread may call all methods; each Transport belongs to one thread at a time.
// Blocking: drain() and, in a Transport, wait(), which also opens connections. wait() polls a
// number of times before it sleeps, because waking up takes longer than most messages.
// Lifetime: shared by its owner and the transports; the System outlives it.
// Errors of a Transport: kPeerLost if the connection to a peer has ended or cannot be opened, or if
// the peer has closed its end of the group. The message has the group ranks of both ends and their
// addresses. kCorruption for a peer that violates docs/formats/link-frames.md; kAborted; kTimeout.
//
// Opening: a rank that waits to send opens a connection if there is none. If two ranks wait for
// each other at the same time, the higher rank opens a connection at once, also if it only
// receives, and the lower rank only if there is none after 20 ms. So there usually is one
// connection; if both have opened one, both are used. If a connection that the peer opened has
// ended before its first frame, the lower rank, too, opens one if it only receives.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/event_pool.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/core/transport/stream_id.h"
#include "cadre/core/transport/tcp/frame_writer.h"
#include "cadre/core/transport/tcp/peer_link.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

struct TcpLinksOptions {
  int rank = 0;  // the rank of this process
  int num_ranks = 1;
  // True if this host has more ranks than cores. A waiting thread yields between two polls.
  bool is_crowded = false;
};

class TcpLinks : public std::enable_shared_from_this<TcpLinks> {
 public:
  // Opens a connection to a peer and performs the handshake; blocks at most until the deadline. The
  // thread that waits calls it without holding a lock. After kTimeout, kAborted or an error with
  // is_own_limit (this process has reached a limit of its own, for example of descriptors) another
  // attempt may follow. All other errors mean that the peer is lost.
  using Dial = std::function<Result<std::unique_ptr<os::Socket>>(int peer, Deadline deadline)>;

  TcpLinks(os::System& system, const TcpLinksOptions& options, Dial dial);

  // Adds a connection that the peer (kAccepted) or this process (kDialed) has opened, after its
  // handshake.
  void add(int peer, std::unique_ptr<os::Socket> socket,
           ConnectionEnd end = ConnectionEnd::kAccepted);
  // Opens the Transport of one group: members[r] is the process rank of group rank r. The members
  // may open it in any order; bytes that arrive before a member has opened it are kept. The
  // destructor of the Transport closes the stream: the peers receive all bytes that were sent, then
  // kPeerLost. The Interrupt must outlive the Transport. REQUIRES: the id was never used before.
  std::unique_ptr<Transport> open(StreamId id, std::vector<int> members, Rank rank,
                                  os::Interrupt& interrupt);
  // Called when the control plane has reported that the peer (a process rank) has left the group:
  // the stream ends after the last byte that the peer has sent. Does nothing unless the stream is
  // open here: a group that opens it later gets the ranks that have left from the control plane.
  void note_left(StreamId id, int peer);
  // Waits until all bytes that were sent have left this host, or until the deadline. Without this
  // wait, closing a connection while the peer still sends, even only credit, would drop bytes that
  // are still unsent. Bytes that arrive are dropped.
  void drain(Deadline deadline);

  LinkCounters counters() const { return meter_.read(); }

 private:
  friend class StreamTransport;

  PeerLink& link(int peer);
  // Returns the link to the peer; null if none was needed yet.
  PeerLink* find(int peer);
  // Opens the stream with this peer for a transport. If note_left() was already called for the
  // peer, the stream is marked accordingly.
  std::shared_ptr<PeerLink::Stream> open_stream(StreamId id, int peer, WaitSpot& spot);
  void close(StreamId id, const std::vector<int>& members);

  os::System& system_;
  const TcpLinksOptions options_;
  const Dial dial_;
  os::EventPool events_;
  ClosedStreams closed_;
  LinkMeter meter_;
  std::mutex mutex_;
  // links_[r] is the link to the process with rank r, made when it is first needed.
  std::vector<std::unique_ptr<PeerLink>> links_;
  // The streams that are open here. The value says for each process rank whether it has left the
  // group; it is empty while no rank has left.
  std::map<StreamId, std::vector<bool>> open_;
};

}  // namespace cadre
