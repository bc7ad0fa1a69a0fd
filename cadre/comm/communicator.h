// A group of ranks over bytes: membership, transport, engine, op numbers, deadlines, failures.
// Complete without torch (<cadre/core.h>); ProcessGroup is a tensor shell over it.
//
// Threads: every method from any thread. Operations are numbered in the order of the calls; all
// ranks must issue the same operations in the same order, so a program that issues from two threads
// orders them itself.
// Blocking: connect, the blocking operations, allocate_symmetric and close, each until its
// deadline. Lifetime: buffers of a blocking call are borrowed until it returns; those of an
// `_async` call must live until its Work is done (attach an owner as
// CollectiveOptions::keep_alive). Errors: cadre::Error. After the first failure the group is
// unusable: every later call throws that failure; close() it and connect a new one over rejoin().
// In a forked child every call throws, but rank() and the like, and destroying it does nothing. In
// a world of one operations are copies. Source: c10d's ProcessGroup, cut to what has a meaning for
// bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/log.h"
#include "cadre/base/types.h"
#include "cadre/collective/collective.h"
#include "cadre/comm/defaults.h"
#include "cadre/comm/flight_record.h"
#include "cadre/comm/work.h"
#include "cadre/os/system.h"
#include "cadre/rendezvous/rendezvous.h"

namespace cadre {

enum class TransportChoice {
  kAuto,          // shared memory where all ranks share a host, else TCP
  kTcp,           // the net engine over TCP, even on one host
  kSharedMemory,  // the host engine, or an error if a rank is on another host
};

struct CommunicatorOptions {
  std::string name = "world";  // in messages; equal on all ranks
  // Equal on all ranks, unique in the job: identifies the group in store keys, handshakes and
  // records. Empty: the name. split() and new_group() derive it, so that groups may share a name.
  std::string id = {};
  Duration timeout = kDefaultOperationTimeout;
  Duration silence_limit = kDefaultSilenceLimit;  // of a peer on another host
  TransportChoice transport = TransportChoice::kAuto;
  // The numeric address that the other ranks reach, never all of them. Empty: where the rendezvous
  // found that they reach this host, which is loopback as long as all are on one.
  std::string listen_host;
  std::string flight_record_path;  // a mapped ring of the last operations; empty: memory only
  std::shared_ptr<LogSink> log;    // shared with the group's threads; null: dropped
};

// Memory of which every rank of a host group holds a piece that the others can use in place:
// all_reduce and friends on it need no copy into a staging area. Elsewhere (TCP, world of one)
// plain memory with the same interface, of which a rank reaches its own piece alone. Lives as long
// as the last handle, also after the group is gone. Groups split off on the host use it in place,
// too; for groups that were connected after rejoin() it is plain memory. What a peer's piece holds,
// and when, is agreed by operations or by signals: what was written before signal() is seen after
// wait_signal(). After a failure of the group it may hold anything; a rank may take the memory back
// from its peers then, and what would reach it throws kAborted and names that rank.
class CADRE_EXPORT SymmetricBuffer {
 public:
  static constexpr uint32_t kNumSignals = 64;  // slots between each two ranks

  virtual ~SymmetricBuffer() = default;
  // This rank's piece, aligned to 4096 bytes, zeroed at first.
  virtual Bytes local() const = 0;
  // Whether the pieces of the other ranks are within reach; else what needs them throws
  // kInvalidArgument.
  virtual bool shares_memory() const = 0;
  // The piece of a rank, which may be this one.
  virtual std::span<const std::byte> peer(Rank rank) const = 0;
  virtual Bytes writable_peer(Rank rank) const = 0;
  // One view of all pieces in rank order, each padded to whole pages of 4096 bytes. Made by the
  // first call; valid as long as the buffer. REQUIRES: shares_memory(), or it throws.
  virtual Bytes contiguous() = 0;
  // Counts a signal to a rank, which may be this one. Never blocks.
  virtual void signal(Rank peer, uint32_t slot) = 0;
  // Waits for one signal from that rank that no earlier wait has taken. Throws as an operation of
  // the group does: a timeout is the group's failure and names the rank.
  virtual void wait_signal(Rank from, uint32_t slot, Deadline deadline) = 0;
};

struct CollectiveOptions {
  std::optional<Deadline> deadline;  // default: now + the group's timeout when it starts
  // Of an asynchronous call: released when the operation is done, by the thread that ran it and
  // without a lock held. What its deleter does may use the group, but must not wait for it.
  std::shared_ptr<const void> keep_alive;
};

// What one rank was last known to do, for messages and traces.
struct PeerStatus {
  Rank rank;
  std::string host;
  int pid = 0;
  // "last seen in all_gather #1041, reduce, 61 s ago" or "left the group after #1041".
  std::string last_seen;
};

class CADRE_EXPORT Communicator {
 public:
  // Collective over the membership. Ranks exchange addresses through the store, prove the job's
  // token to each other, refuse another build with both versions named, and connect.
  static std::unique_ptr<Communicator> connect(os::System& system, const Membership& membership,
                                               const CommunicatorOptions& options,
                                               Deadline deadline);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Rank rank() const;
  int world_size() const;
  const std::string& name() const;
  // Of CommunicatorOptions::id, or the name.
  const std::string& id() const;
  os::System& system() const;
  // "host" or "net", after what was connected.
  std::string_view backend_name() const;
  bool shares_memory() const;
  // What it was connected with.
  const Membership& membership() const;
  const CommunicatorOptions& options() const;
  // The ranks of this group in the group that was connected first (the world), by rank of this
  // group.
  std::vector<Rank> global_ranks() const;
  // One of them. c10d's get_global_rank.
  Rank global_rank(Rank group_rank) const;
  // The reverse; nullopt for a rank of the world that is not in this group. c10d's get_group_rank.
  std::optional<Rank> group_rank(Rank global_rank) const;
  // Issued so far on this rank; equal on all ranks between operations.
  uint64_t num_collectives() const;

  // Runs a collective, or issues it and returns at once. Buffers, shapes and what may be in place:
  // collective/collective.h; which operations a dtype supports, and why others are refused:
  // collective/reduction_table.h. The verbs below are run() and issue() by name.
  void run(Collective collective, const CollectiveOptions& options = {});
  Work issue(Collective collective, const CollectiveOptions& options = {});

  void broadcast(Bytes data, DType dtype, Rank root, const CollectiveOptions& options = {}) {
    run(Collective::broadcast(data, dtype, root), options);
  }
  Work broadcast_async(Bytes data, DType dtype, Rank root, const CollectiveOptions& options = {}) {
    return issue(Collective::broadcast(data, dtype, root), options);
  }
  void all_reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                  const CollectiveOptions& options = {}) {
    run(Collective::all_reduce(in, out, dtype, reduction), options);
  }
  Work all_reduce_async(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                        const CollectiveOptions& options = {}) {
    return issue(Collective::all_reduce(in, out, dtype, reduction), options);
  }
  void all_gather(ConstBytes in, Bytes out, DType dtype, const CollectiveOptions& options = {}) {
    run(Collective::all_gather(in, out, dtype), options);
  }
  Work all_gather_async(ConstBytes in, Bytes out, DType dtype,
                        const CollectiveOptions& options = {}) {
    return issue(Collective::all_gather(in, out, dtype), options);
  }
  // counts: elements of each rank's input, the same on all ranks; ranks with others are refused.
  void all_gather_v(ConstBytes in, Bytes out, DType dtype, std::vector<uint64_t> counts,
                    const CollectiveOptions& options = {}) {
    run(Collective::all_gather_v(in, out, dtype, std::move(counts)), options);
  }
  Work all_gather_v_async(ConstBytes in, Bytes out, DType dtype, std::vector<uint64_t> counts,
                          const CollectiveOptions& options = {}) {
    return issue(Collective::all_gather_v(in, out, dtype, std::move(counts)), options);
  }
  void reduce_scatter(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                      const CollectiveOptions& options = {}) {
    run(Collective::reduce_scatter(in, out, dtype, reduction), options);
  }
  Work reduce_scatter_async(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                            const CollectiveOptions& options = {}) {
    return issue(Collective::reduce_scatter(in, out, dtype, reduction), options);
  }
  // counts: elements of each rank's output, the same on all ranks; ranks with others are refused.
  void reduce_scatter_v(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                        std::vector<uint64_t> counts, const CollectiveOptions& options = {}) {
    run(Collective::reduce_scatter_v(in, out, dtype, reduction, std::move(counts)), options);
  }
  Work reduce_scatter_v_async(ConstBytes in, Bytes out, DType dtype, Reduction reduction,
                              std::vector<uint64_t> counts, const CollectiveOptions& options = {}) {
    return issue(Collective::reduce_scatter_v(in, out, dtype, reduction, std::move(counts)),
                 options);
  }
  void barrier(const CollectiveOptions& options = {}) { run(Collective::barrier(), options); }
  Work barrier_async(const CollectiveOptions& options = {}) {
    return issue(Collective::barrier(), options);
  }
  // The root gets the bits of all_reduce.
  void reduce(ConstBytes in, Bytes out, DType dtype, Reduction reduction, Rank root,
              const CollectiveOptions& options = {}) {
    run(Collective::reduce(in, out, dtype, reduction, root), options);
  }
  Work reduce_async(ConstBytes in, Bytes out, DType dtype, Reduction reduction, Rank root,
                    const CollectiveOptions& options = {}) {
    return issue(Collective::reduce(in, out, dtype, reduction, root), options);
  }
  void gather(ConstBytes in, Bytes out, DType dtype, Rank root,
              const CollectiveOptions& options = {}) {
    run(Collective::gather(in, out, dtype, root), options);
  }
  Work gather_async(ConstBytes in, Bytes out, DType dtype, Rank root,
                    const CollectiveOptions& options = {}) {
    return issue(Collective::gather(in, out, dtype, root), options);
  }
  void scatter(ConstBytes in, Bytes out, DType dtype, Rank root,
               const CollectiveOptions& options = {}) {
    run(Collective::scatter(in, out, dtype, root), options);
  }
  Work scatter_async(ConstBytes in, Bytes out, DType dtype, Rank root,
                     const CollectiveOptions& options = {}) {
    return issue(Collective::scatter(in, out, dtype, root), options);
  }
  void all_to_all(ConstBytes in, Bytes out, DType dtype, const CollectiveOptions& options = {}) {
    run(Collective::all_to_all(in, out, dtype), options);
  }
  Work all_to_all_async(ConstBytes in, Bytes out, DType dtype,
                        const CollectiveOptions& options = {}) {
    return issue(Collective::all_to_all(in, out, dtype), options);
  }
  // When one rank sends what the other does not expect, all ranks throw kInvalidArgument that names
  // both, before any data moves.
  void all_to_all_v(ConstBytes in, Bytes out, DType dtype, SplitCounts splits,
                    const CollectiveOptions& options = {}) {
    run(Collective::all_to_all_v(in, out, dtype, std::move(splits)), options);
  }
  Work all_to_all_v_async(ConstBytes in, Bytes out, DType dtype, SplitCounts splits,
                          const CollectiveOptions& options = {}) {
    return issue(Collective::all_to_all_v(in, out, dtype, std::move(splits)), options);
  }
  // Messages between one pair and with one tag arrive in order; sizes and types must match. A send
  // of up to 16 KiB may return before it is received, a longer one waits for its receive. A rank
  // buffers at most 4 MiB from each peer that no recv has taken. Sending to this rank itself is
  // refused.
  void send(ConstBytes data, DType dtype, Rank destination, int tag,
            const CollectiveOptions& options = {});
  void recv(Bytes data, DType dtype, Rank source, int tag, const CollectiveOptions& options = {});
  // Receives from any rank, the first that sends with this tag; returns that rank. kPeerLost when
  // all others have left. c10d's recvAnysource. Receives of one tag, from a rank and from any, take
  // messages in the order in which they were called.
  Rank recv_from_any(Bytes data, DType dtype, int tag, const CollectiveOptions& options = {});

  Work send_async(ConstBytes data, DType dtype, Rank destination, int tag,
                  const CollectiveOptions& options = {});
  Work recv_async(Bytes data, DType dtype, Rank source, int tag,
                  const CollectiveOptions& options = {});

  // Collective: every rank calls it with the same size, in the order of the operations.
  std::shared_ptr<SymmetricBuffer> allocate_symmetric(size_t num_bytes,
                                                      const CollectiveOptions& options = {});

  // Wall time this rank's threads spent inside operations other than messages so far, waiting
  // included.
  Duration time_in_operations() const;
  std::vector<PeerStatus> peers() const;
  // Ranks known to be gone (killed or left), for rejoin().
  std::vector<Rank> lost_ranks() const;

  // Ends every wait on this rank and publishes the failure: the other ranks throw kAborted with
  // `reason`. Never blocks; may be called from any thread and from a signal-handling thread.
  void abort(const std::string& reason);
  // Runs pending operations until the deadline, publishes to the members that this rank leaves, and
  // joins the group's threads; with the last group of the process, closes its connections.
  // Idempotent. The destructor only aborts locally and communicates for 1 s at most.
  // After that it throws kInvalidArgument if ranks are known to have left this group, or one that
  // was closed before, after different collectives: a small broadcast, reduce, gather or scatter
  // may succeed on a rank although another rank called something else. Of two such ranks of one
  // host at least the one that closes later throws. Two ranks of different hosts that close their
  // last groups at the same moment may both miss the mismatch, as may ranks that clean up after a
  // failure. A destructor only logs it.
  void close(Deadline deadline);

  // The last operations of this rank; to_json() makes it readable.
  FlightRecord flight_record() const;

 private:
  struct Key {  // only comm can make one
    explicit Key() = default;
  };

 public:
  class Impl;  // comm's own
  Communicator(Key, std::unique_ptr<Impl> impl);

 private:
  friend struct CommunicatorParts;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
