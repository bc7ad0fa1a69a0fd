// The data connections of one process over TCP: at most a few to each peer, opened on first use,
// shared by the streams of all its groups.
//
// Threads: all methods from any thread; each Transport belongs to one thread at a time, as always.
// Blocking: drain(); of a Transport only wait(), which also opens connections. It looks a few times
// before it sleeps, because waking up costs more than most messages.
// Lifetime: shared by its owner and the transports; the System outlives it.
// Errors: of a Transport: kPeerLost when the connection to a peer has ended, cannot be opened, or
// the peer has closed its end of the group, with both ranks in the group's numbering and the
// addresses; kCorruption for a peer that breaks the rules of docs/formats/link-frames.md; kAborted,
// kTimeout.
//
// Opening: a rank that waits to send opens a connection if there is none. If two want one at the
// same time, the higher rank opens it at once, also to receive, and the lower one only after 20 ms
// without one, so that one connection is usual. If both have opened one, both are used. After a
// connection of the peer that ended before its first frame the lower rank, too, opens one to
// receive.
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
  int rank = 0;  // rank of this process
  int num_ranks = 1;
  // More ranks than cores on this host: waiting gives the core away instead of looking again.
  bool is_crowded = false;
};

class TcpLinks : public std::enable_shared_from_this<TcpLinks> {
 public:
  // Opens and proves a connection to a peer; blocking until the deadline. Called without a lock
  // held, by the thread that waits. kTimeout: it may be tried again; all else is for good.
  using Dial = std::function<Result<std::unique_ptr<os::Socket>>(int peer, Deadline deadline)>;

  TcpLinks(os::System& system, const TcpLinksOptions& options, Dial dial);

  // A connection that the peer has opened (kAccepted) or that this process has (kDialed), proved at
  // both ends.
  void add(int peer, std::unique_ptr<os::Socket> socket,
           ConnectionEnd end = ConnectionEnd::kAccepted);
  // The Transport of one group: members[r] is the process rank of group rank r. The members open it
  // in any order; what comes before is kept. Destroying it closes the stream: peers receive what
  // was sent, then kPeerLost. The Interrupt outlives it. REQUIRES: the id was never used before.
  std::unique_ptr<Transport> open(StreamId id, std::vector<int> members, Rank rank,
                                  os::Interrupt& interrupt);
  // The peer (a process rank) has left the group, as the control plane says: its stream ends behind
  // what it sent. Ignored unless the stream is open here; whoever opens it asks the plane again.
  void note_left(StreamId id, int peer);
  // Until everything that was sent has left this host, or the deadline: closing a connection while
  // the peer still sends, if only credit, drops what has not left. What comes is dropped.
  void drain(Deadline deadline);

  LinkCounters counters() const { return meter_.read(); }

 private:
  friend class StreamTransport;

  PeerLink& link(int peer);
  // Null as long as there was no need of one.
  PeerLink* find(int peer);
  // The stream with this peer, for the transport that opened it; told already if the peer has left.
  std::shared_ptr<PeerLink::Stream> open_stream(StreamId id, int peer, WaitSpot& spot);
  void close(StreamId id, const std::vector<int>& members);

  os::System& system_;
  const TcpLinksOptions options_;
  const Dial dial_;
  os::EventPool events_;
  ClosedStreams closed_;
  LinkMeter meter_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<PeerLink>> links_;  // by process rank, made when they are needed
  // The streams that are open here, and which process ranks have left each; empty while none has.
  std::map<StreamId, std::vector<bool>> open_;
};

}  // namespace cadre
