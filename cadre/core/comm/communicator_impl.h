// The parts of a Communicator and the order in which they are made and destroyed.
//
// Threads, blocking and errors: see Communicator. Only files of comm/ use this header.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/host/host_engine.h"
#include "cadre/core/comm/collective_runner.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/engine_set.h"
#include "cadre/core/comm/failure/monitor.h"
#include "cadre/core/comm/messages/message_queue.h"
#include "cadre/core/comm/messages/signal_waits.h"
#include "cadre/core/comm/queue/operation_queue.h"
#include "cadre/core/comm/symmetric/one_sided_access.h"
#include "cadre/core/comm/symmetric/symmetric_heap.h"
#include "cadre/core/fabric/fabric.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/core/fabric/fork_guard.h"
#include "cadre/core/fabric/group_identity.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

// The ranks of a group.
struct GroupMembers {
  std::vector<int> ranks;  // ranks[r] is the rank in the fabric of the group's rank r
  Rank self;               // the rank of this process in the group
  // The membership that rejoin() starts from; its `group` is unique in the job.
  Membership membership;
  // The identity under which a member reports that it gives up while the members create the group
  // over a store; nullopt for groups that are created in another way.
  std::optional<GroupIdentity> creation = {};
};

// The pieces of the host's memory that a rank allocates for a group before the group exists. The
// exchange that creates the group sends their places to the other ranks.
struct GroupPieces {
  Piece block;
  Piece message_page;

  // `holders` are the slots of the ranks that may become members and use the pieces.
  static Result<GroupPieces> cut(HostMemory& memory, const std::vector<int>& holders);
  // Removes the ranks that do not become members from the users of the pieces, so that only members
  // keep the memory from being reused. `slots` are those of the members.
  void keep_holders(const std::vector<int>& slots);
  // Called when all ranks know that none of them uses these pieces.
  void discard();
  GroupPlaces places() const;
};

class Communicator::Impl {
 public:
  // Registers the group with the fabric; open() makes it ready.
  Impl(std::shared_ptr<Fabric> fabric_in, const CommunicatorOptions& options_in,
       GroupIdentity identity_in, GroupMembers members_in);
  ~Impl();

  // Returns whether no other member exists (groups/lone_group.h).
  bool is_lone() const { return world_size > 1 && fabric->plane() == nullptr; }
  // Returns whether the members on this host communicate through its memory. Throws if the options
  // ask for that for all members and it is impossible.
  bool uses_host_memory() const;
  // Returns whether members are on several hosts.
  bool spans_hosts() const;
  // Returns the ranks in the group of the members on this host, in ascending order.
  std::vector<Rank> local_ranks() const;
  // Returns the slots of these members in the host's memory, in the same order.
  std::vector<int> local_slots() const;
  // Fails the group because this rank cannot finish `task`, so that the other members do not wait
  // for this rank.
  void give_up(const std::exception& thrown, std::string_view task);
  // Returns the member that the error names as the culprit; this rank if it names none. The
  // culprit of a store that the program has passed may be no member.
  Rank culprit_of(const Error& error) const;
  // Makes the group ready to run operations. With pieces, the members on this host communicate
  // through its memory, and places[r] are the places of the pieces of the group's rank r; those of
  // ranks on other hosts are ignored. Without pieces, they communicate over TCP. The factories of
  // the program have time until the deadline.
  void open(std::optional<GroupPieces> pieces, const std::vector<GroupPlaces>& places,
            Deadline deadline);
  // Opens the group of all ranks. No earlier group can carry the places of the ranks' pieces of
  // memory, so the ranks exchange them here.
  void open_first(Deadline deadline);

  // Returns *this, or throws in a forked child of the process that connected the group. Every
  // public call uses it first.
  Impl& checked() {
    fork_guard->check();
    return *this;
  }
  // Throws if the group was closed without a failure.
  void check_open(std::string_view call) const;
  // Leaves the group when its operations have ended. Operations that are still pending at the
  // deadline are aborted. Returns false if the group was closed before.
  bool close(Deadline deadline);
  void abort(const std::string& reason);
  // Returns whether the calling thread is a thread of this group and runs code of the program in
  // it, such as a callback. If so, close() would wait for itself.
  bool is_on_own_thread() const;
  // Returns whether a thread for which is_on_own_thread() is true waits for the end of another
  // group.
  bool awaits_other() const;

  std::shared_ptr<Fabric> fabric;  // shared by the groups of this process
  os::System& system;
  const CommunicatorOptions options;
  const GroupIdentity identity;
  const GroupMembers members;
  const Rank rank;
  const int world_size;
  // Shared with Works and symmetric buffers, which may outlive the group.
  const std::shared_ptr<const ForkGuard> fork_guard;
  // Shared with symmetric buffers, and with the monitor, which ends the access when the group
  // fails.
  const std::shared_ptr<OneSidedAccess> one_sided_access;

  // Each of these parts is declared before the parts that use it, so it is destroyed after them.
  std::unique_ptr<FlightRecorder> recorder;
  std::shared_ptr<Monitor> monitor;      // shared with the control plane
  std::unique_ptr<Transport> transport;  // the transport of the net engine
  std::unique_ptr<Transport> message_transport;
  EngineSet engines;
  std::shared_ptr<SignalWaits> signal_waits;  // symmetric buffers have weak references to it
  std::unique_ptr<SymmetricHeap> heap;
  std::unique_ptr<CollectiveRunner> runner;
  // Shared with Works, which may outlive the group.
  std::shared_ptr<OperationQueue> queue;
  std::shared_ptr<MessageQueue> messages;  // null if the group has no peers
  // The number of message spaces reserved so far; see message_calls.h.
  std::atomic<uint32_t> num_message_spaces{0};

 private:
  const wire::RankAddress& own_address() const {
    return fabric->layout().rank_address(fabric->rank().value);
  }
  std::unique_ptr<FlightRecorder> make_recorder() const;
  std::shared_ptr<Monitor> make_monitor() const;
  // `call` is the name of the call that failed; empty if it is not known.
  Error closed_error(std::string_view call) const;
  // Makes the engine of the members on this host.
  std::unique_ptr<HostEngine> make_host_engine(Piece block,
                                               const std::vector<GroupPlaces>& places) const;
  void open_message_pages(Piece page, const std::vector<GroupPlaces>& places);
  void release_blocks(const std::vector<GroupPlaces>& places) const;
  void release_pages(const std::vector<GroupPlaces>& places) const;
  // Opens the channels over TCP, and makes the engine that uses them. `local` is the engine of the
  // members on this host, if these are some of the members and share memory.
  void open_streams(std::unique_ptr<HostEngine> local);
  std::unique_ptr<Backend> make_net_engine(std::unique_ptr<HostEngine> local);
  bool is_hierarchical() const;
  void build_device_engine(const DeviceBackend& chosen, Deadline deadline);
  std::unique_ptr<Backend> build_engine(const BackendFactory& factory, const Device& device,
                                        Deadline deadline) const;
  std::string engine_names() const;
  std::string_view transport_name() const;
  void log_start() const;
  bool has_pending() const;
  void end();
  void attempt(const std::function<void()>& step) const noexcept;
  bool is_idle() const;
  // Returns whether all operations have ended by the deadline.
  bool drain(Deadline deadline);
  void stop_threads();
  void release(Deadline deadline);
  void leave_engines_to_process();

  // The number of exceptions in flight when the group was made: a larger number in the destructor
  // means that an exception unwinds the stack.
  const int num_exceptions_ = std::uncaught_exceptions();
  std::atomic<bool> is_closed_{false};
  bool is_released_ = false;
};

// Gives the other files of comm access to the parts of a Communicator.
struct CommunicatorParts {
  static Communicator::Impl& impl_of(const Communicator& group);
  // Implements must_end_elsewhere() of group_destruction.h.
  static bool must_end_elsewhere(const Communicator& group);
  // Returns a pointer that identifies the group: those of two groups have different owners, also
  // if the second has the address of the first, which was destroyed.
  static std::weak_ptr<const void> life_of(const Communicator& group);
};

// Returns the settings of the fabric of a first group.
FabricSettings fabric_settings(const Membership& membership, const CommunicatorOptions& options);

}  // namespace cadre
