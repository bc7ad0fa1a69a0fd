// The data connections of one process over TCP: at most a few to each peer, which are opened on
// first use and shared by the streams of all groups of the process.
//
// Threads: all methods from any thread; each Transport belongs to one thread at a time, as always.
// Blocking: drain() and, in a Transport, wait(), which also opens connections. wait() looks a few
// times before it sleeps, because waking up takes longer than most messages.
// Lifetime: shared by its owner and the transports; the System outlives it.
// Errors of a Transport: kPeerLost if the connection to a peer has ended or cannot be opened, or if
// the peer has closed its end of the group; the message has both ranks, as the group numbers them,
// and the addresses. kCorruption for a peer that breaks the rules of docs/formats/link-frames.md;
// kAborted; kTimeout.
//
// Opening: a rank that waits to send opens a connection if there is none. If two ranks want one at
// the same time, the higher rank opens it at once, also to receive, and the lower rank only after
// 20 ms without one. So there usually is one connection; if both have opened one, both are used. If
// a connection that the peer opened has ended before its first frame, the lower rank also opens one
// to receive.
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
  // This host has more ranks than cores. A waiting thread then yields between its looks.
  bool is_crowded = false;
};

class TcpLinks : public std::enable_shared_from_this<TcpLinks> {
 public:
  // Opens a connection to a peer and proves the token on it; blocks until the deadline at most. The
  // thread that waits calls it without a lock held. After kTimeout, kAborted or an error with
  // is_own_limit another attempt may follow; every other error is final.
  using Dial = std::function<Result<std::unique_ptr<os::Socket>>(int peer, Deadline deadline)>;

  TcpLinks(os::System& system, const TcpLinksOptions& options, Dial dial);

  // Adds a connection that the peer (kAccepted) or this process (kDialed) has opened, after both
  // ends have proved the token.
  void add(int peer, std::unique_ptr<os::Socket> socket,
           ConnectionEnd end = ConnectionEnd::kAccepted);
  // Opens the Transport of one group: members[r] is the process rank of group rank r. The members
  // open it in any order; what comes before is kept. Its destructor closes the stream: peers
  // receive what was sent, then kPeerLost. The Interrupt outlives it. REQUIRES: the id was never
  // used before.
  std::unique_ptr<Transport> open(StreamId id, std::vector<int> members, Rank rank,
                                  os::Interrupt& interrupt);
  // Called when the control plane has reported that the peer (a process rank) has left the group:
  // its stream ends behind what the peer sent. Ignored unless the stream is open here; whoever
  // opens it asks the plane again.
  void note_left(StreamId id, int peer);
  // Waits until everything that was sent has left this host, or until the deadline. Otherwise,
  // closing a connection while the peer still sends, if only credit, would drop what has not left.
  // What comes is dropped.
  void drain(Deadline deadline);

  LinkCounters counters() const { return meter_.read(); }

 private:
  friend class StreamTransport;

  PeerLink& link(int peer);
  // Returns null if no link to the peer was needed yet.
  PeerLink* find(int peer);
  // Opens the stream with this peer for a transport. If the peer has already left the group, the
  // stream is told.
  std::shared_ptr<PeerLink::Stream> open_stream(StreamId id, int peer, WaitSpot& spot);
  void close(StreamId id, const std::vector<int>& members);

  os::System& system_;
  const TcpLinksOptions options_;
  const Dial dial_;
  os::EventPool events_;
  ClosedStreams closed_;
  LinkMeter meter_;
  std::mutex mutex_;
  // links_[r] is the link to the process with rank r, which is made when it is needed.
  std::vector<std::unique_ptr<PeerLink>> links_;
  // The streams that are open here. The value says for each process rank whether it has left; it is
  // empty while none has.
  std::map<StreamId, std::vector<bool>> open_;
};

}  // namespace cadre
