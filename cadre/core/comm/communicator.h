// A group of ranks over bytes: membership, transport, engine, operation numbers, deadlines,
// failures. Needs no torch (<cadre/core.h>); ProcessGroup is a wrapper of it for tensors.
//
// Threads: every method from any thread. Operations are numbered in the order of the calls; all
// ranks must issue the same operations in the same order, so a program that issues operations from
// two threads must synchronize these threads.
// Blocking: connect, the blocking operations, allocate_symmetric and close, each until its
// deadline. Lifetime: the buffers of a blocking call are borrowed until it returns; buffers on a
// device until the operation has ended on its stream. The buffers of an `_async` call must live
// until its Work is completed (attach an owner as CollectiveOptions::keep_alive). Errors:
// cadre::Error. After the first failure the group is unusable: every later call throws that
// failure; close() it and connect a new one over rejoin(). In a forked child every call throws,
// except for rank() and other simple getters, and the destructor does nothing. In a world of one
// rank the operations are copies. Source: c10d's ProcessGroup, reduced to what makes sense for
// bytes.
// Guide: docs/guide/reference/groups-and-messages.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/comm/communicator_options.h"
#include "cadre/core/comm/messages/message_call.h"
#include "cadre/core/comm/queue/work.h"
#include "cadre/core/comm/symmetric/symmetric_buffer.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

// The last known activity of one rank, for messages and traces.
struct PeerStatus {
  Rank rank;
  std::string host;
  int pid = 0;
  // For example "last seen in all_gather #1041, reduce, 61 s ago" or "left the group after #1041".
  std::string last_seen;
};

class CADRE_EXPORT Communicator {
 public:
  // Connects this rank to the group; all ranks of the membership must call it. Ranks exchange
  // addresses through the store, prove to each other that they know the job's token, and connect. A
  // rank with another version of Cadre is rejected with an error that names both versions.
  static std::unique_ptr<Communicator> connect(os::System& system, const Membership& membership,
                                               const CommunicatorOptions& options,
                                               Deadline deadline);
  // Aborts pending operations and leaves the group, as close() does. In a callback of a group, or
  // in the deleter of a keep_alive, the destructor returns at once, and another thread ends the
  // group soon after. So the System must outlive that thread. Handles from init_process_group() and
  // handles of subgroups keep their System alive. Throws nothing.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  Rank rank() const;
  int world_size() const;
  const std::string& name() const;
  // Returns CommunicatorOptions::id, or the name if that is empty.
  const std::string& id() const;
  os::System& system() const;
  // Returns the name of the engine: "host", "net" or that of the chosen backend; "solo" for a world
  // of one.
  std::string_view backend_name() const;
  bool shares_memory() const;
  // Returns the device of this rank on whose memory the group works, beside memory of the CPU;
  // nullopt if it works on memory of the CPU only.
  std::optional<Device> device() const;
  // Return the membership and the options with which the group was connected.
  const Membership& membership() const;
  const CommunicatorOptions& options() const;
  // Returns the world rank of each member, indexed by its rank in this group. The world is the
  // group that was connected first.
  std::vector<Rank> global_ranks() const;
  // Returns the rank in the world of a rank of this group. Same as c10d's get_global_rank.
  Rank global_rank(Rank group_rank) const;
  // Returns the rank in this group of a rank of the world; nullopt if it is no member. Same as
  // c10d's get_group_rank.
  std::optional<Rank> group_rank(Rank global_rank) const;
  // Returns the number of the host of each rank, indexed by the rank in this group. Hosts are
  // numbered in the order of their lowest ranks in this group. A host is a running kernel in one
  // network namespace.
  std::vector<int> hosts() const;
  // Returns how many collectives this rank has issued; equal on all ranks between operations.
  uint64_t num_collectives() const;

  // Runs a collective, or issues it and returns at once. For a stream-ordered engine, issue()
  // returns when the engine has the collective, so it waits for the calls before it that a blocking
  // engine of the group runs. collective/collective.h describes buffers,
  // shapes and what may be in place; collective/reduction_table.h says which operations a dtype
  // supports, and why others are not supported. The methods below are run() and issue() by name.
  void run(Collective collective, const CollectiveOptions& options = {}) {
    run_own(std::span(&collective, 1), options);
  }
  Work issue(Collective collective, const CollectiveOptions& options = {}) {
    return issue_own(std::span(&collective, 1), options);
  }
  // Run or issue one or more collectives together. They are submitted to the engine as one call,
  // have consecutive numbers, one deadline and one Work, and end with the first error. All ranks
  // must pass the same number of collectives; a difference is detected for kinds without a root. No
  // buffer of one collective may overlap a buffer of another. The span is borrowed for the call.
  // Same as ncclGroupStart and ncclGroupEnd, or c10d's _coalescing_manager.
  void run(std::span<const Collective> collectives, const CollectiveOptions& options = {});
  Work issue(std::span<const Collective> collectives, const CollectiveOptions& options = {});

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
  // Gathers parts of different sizes: counts[r] is the number of elements of rank r's input. Calls
  // fail on all ranks if their counts differ between ranks.
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
  // Reduces and scatters parts of different sizes: counts[r] is the number of elements of rank r's
  // output. Calls fail on all ranks if their counts differ between ranks.
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
  // Reduces to the root, which gets the same bits as from all_reduce().
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
  // Sends splits.input[r] elements to each rank r. If a rank sends another number of elements than
  // the receiver expects, all ranks throw kInvalidArgument, which names both ranks, before any data
  // moves.
  void all_to_all_v(ConstBytes in, Bytes out, DType dtype, SplitCounts splits,
                    const CollectiveOptions& options = {}) {
    run(Collective::all_to_all_v(in, out, dtype, std::move(splits)), options);
  }
  Work all_to_all_v_async(ConstBytes in, Bytes out, DType dtype, SplitCounts splits,
                          const CollectiveOptions& options = {}) {
    return issue(Collective::all_to_all_v(in, out, dtype, std::move(splits)), options);
  }
  // Messages between two ranks with the same tag arrive in order; sizes and types must match. A
  // send of up to 16 KiB may return before it is received; a longer one waits for its receive. A
  // rank buffers at most 4 MiB from each peer for messages that no recv has taken yet. send() and
  // recv() throw if the peer is this rank itself.
  void send(ConstBytes data, DType dtype, Rank destination, int tag,
            const CollectiveOptions& options = {});
  void recv(Bytes data, DType dtype, Rank source, int tag, const CollectiveOptions& options = {});
  // Receives from the rank that is the first to send with this tag, and returns that rank. Throws
  // kPeerLost when all other ranks have left. Same as c10d's recvAnysource. Receives of one tag,
  // from one rank and from any, take messages in the order in which they were called.
  Rank recv_from_any(Bytes data, DType dtype, int tag, const CollectiveOptions& options = {});

  Work send_async(ConstBytes data, DType dtype, Rank destination, int tag,
                  const CollectiveOptions& options = {});
  Work recv_async(Bytes data, DType dtype, Rank source, int tag,
                  const CollectiveOptions& options = {});
  // Issues sends and receives together, so that their order does not matter on any rank. If one has
  // invalid arguments, throws and issues none. Returns one Work for each. Same as c10d's
  // batch_isend_irecv.
  std::vector<Work> issue(std::span<const MessageCall> calls,
                          const CollectiveOptions& options = {});

  // Allocates memory that peers on the same host access in place. Collective: every rank calls it
  // with the same size, in the order of the operations.
  std::shared_ptr<SymmetricBuffer> allocate_symmetric(size_t num_bytes,
                                                      const CollectiveOptions& options = {});

  // Returns the wall time that this rank's threads have spent inside collectives and allocations,
  // including waits, but not in sends and receives.
  Duration time_in_operations() const;
  std::vector<PeerStatus> peers() const;
  // Returns the first failure of this group, which every later call throws; nullopt while the group
  // is usable. A call with invalid arguments throws before it has issued anything, and the group
  // does not fail. error() does not communicate, so it does not return a failure of another rank
  // whose report has not arrived yet. Same as ncclCommGetAsyncError.
  std::optional<Error> error() const;
  // Returns the ranks that are known to be gone (killed or left), for rejoin().
  std::vector<Rank> lost_ranks() const;

  // Fails the group: every pending and every later operation throws kAborted with `reason`, on this
  // rank and on all others, whatever they do at the time. A group that has failed already keeps its
  // first failure. After abort(), close() the group or call rejoin(). Never blocks; may be called
  // from any thread, also from one that waits for signals.
  void abort(const std::string& reason);
  // Makes this group and `other` fail together on this rank from now on. A failure of one of them,
  // also an earlier one, aborts the other group with the text and culprit of the first failure,
  // unless that group is being closed. Useful for groups that a program uses alternately: the error
  // of a rank that waits in one group then names the rank that was lost in the other group, instead
  // of saying "rank 0 left". Every rank that is a member of both groups calls it. Keeps neither
  // group alive.
  void fail_together(const Communicator& other);
  // Runs pending operations until the deadline, publishes to the members that this rank leaves, and
  // joins the group's threads. The join may last beyond the deadline while a callback of an
  // operation runs. The last group of the process also closes its connections. Operations that are
  // still pending at the deadline are aborted, which fails the group on all ranks: Work::wait() of
  // each aborted operation throws kAborted on every rank. close() itself does not throw because of
  // them, so call wait() first for operations that must succeed. Later calls throw
  // kInvalidArgument. A second close() does nothing. The destructor only aborts locally and
  // communicates for 1 s at most.
  //
  // At its end close() throws kInvalidArgument if it is known that two ranks left this group, or a
  // group that was closed before, after different last collectives. This check is needed because a
  // small broadcast, reduce, gather or scatter may succeed on a rank although another rank called a
  // different collective. If two such ranks are on one host, at least the one that closes later
  // throws. Two ranks of different hosts that close their last groups at the same moment may both
  // miss the mismatch, as may ranks that clean up after a failure. The destructor only logs the
  // mismatch.
  //
  // close() throws kInvalidArgument and does nothing in a callback of this group or in the deleter
  // of a keep_alive, because it would wait for itself. It also throws in a callback of another
  // group while a callback of this group closes a group.
  void close(Deadline deadline);

  // Returns the last operations of this rank; to_json() makes them readable.
  FlightRecord flight_record() const;

  class Impl;  // defined in the folder comm, so that no other folder can create a Communicator
  explicit Communicator(std::unique_ptr<Impl> impl);

 private:
  friend struct CommunicatorParts;
  // Do the same as run() and issue(), but may change the collectives: arguments that do not apply
  // to this rank are reset.
  void run_own(std::span<Collective> collectives, const CollectiveOptions& options);
  Work issue_own(std::span<Collective> collectives, const CollectiveOptions& options);

  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
