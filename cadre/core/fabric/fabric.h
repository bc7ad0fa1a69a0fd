// The resources that all groups of a process share in one job and round: the layout of the ranks,
// the control plane, the memory shared on its host, the status page and the data connections.
//
// Threads: any thread may call all methods. The fabric has one thread, that of the control plane.
// Blocking: connect() and leave_group(), until their deadlines. Lifetime: shared by the groups of
// the process; the last group that leaves closes it. Borrows the System. Errors: connect() fails
// like connect_fabric() (bootstrap). A group adds no thread, no connection and no mapping: it
// allocates what it needs from the host's memory, and its bytes use the connections of the fabric
// (docs/decisions/0011-fabric.md).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/fabric/bootstrap/connect_fabric.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/fabric/flight_files.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/fabric/plane/late_errors.h"
#include "cadre/core/fabric/status_page.h"
#include "cadre/core/memory/host_memory.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/os/host/fork_mark.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/transport/tcp/tcp_links.h"

namespace cadre {

// The places in the host's shared memory that a rank publishes for its peers in a group.
struct GroupPlaces {
  Place block;         // the place of the block that the host engine uses
  Place message_page;  // the place of the page that messages use
};

// The settings with which a fabric connects, from the options of its first group.
struct FabricSettings {
  std::string connection = "world";      // the result of connection_name() for the first group
  std::string listen_host;               // see CommunicatorOptions::listen_host
  DeviceType device = DeviceType::kCpu;  // the type of CommunicatorOptions::device_backend
  std::string flight_record_path;        // see CommunicatorOptions::flight_record_path
  Duration silence_limit = kDefaultSilenceLimit;
  std::shared_ptr<LogSink> log;
  std::function<Result<std::string>()> settings = {};  // see FabricOptions::settings
};

class Fabric {
  struct Key {  // only Fabric can make a Key, so only it calls the constructor
    explicit Key() = default;
  };

 public:
  // Connects this process to the other ranks of the membership, which all make this call.
  static Result<std::shared_ptr<Fabric>> connect(os::System& system, const Membership& membership,
                                                 const FabricSettings& settings, Deadline deadline);
  // Makes the fabric of a process without peers. The layout lists all ranks of the membership as
  // ranks of this process, because a group whose engine simulates its peers
  // (comm/groups/lone_group.h) has more than one rank.
  static std::shared_ptr<Fabric> stand_alone(os::System& system, const Membership& membership,
                                             const FabricSettings& settings);
  Fabric(Key, os::System& system, const Membership& membership, const FabricSettings& settings);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  os::System& system() const { return system_; }
  Rank rank() const { return rank_; }
  const Layout& layout() const { return *layout_; }
  const std::shared_ptr<const Layout>& shared_layout() const { return layout_; }
  // Returns a random number that is equal on all ranks of this fabric and differs from that of
  // every other fabric.
  uint64_t connection_number() const { return layout_->rank_address(0).probe; }
  const std::shared_ptr<const os::ForkMark>& fork_mark() const { return fork_mark_; }
  // Returns the settings of rank 0, equal on all ranks.
  const std::string& settings() const { return settings_; }

  FlightFiles& flight_files() { return flight_files_; }

  // Returns null for a process without peers.
  ControlPlane* plane() const { return plane_.get(); }
  // Returns null for a process without peers.
  TcpLinks* links() const { return links_.get(); }
  const std::shared_ptr<TcpLinks>& shared_links() const { return links_; }
  // Returns the queue of errors of groups that were already closed when the errors were detected.
  const std::shared_ptr<LateErrors>& late_errors() const { return late_errors_; }
  // Returns null if this rank shares no memory.
  const std::shared_ptr<HostMemory>& host_memory() const { return host_memory_; }
  // Returns the reason why this rank shares no memory, if host_memory() is null.
  const std::string& obstacle() const { return obstacle_; }
  const StatusPage& status_page() const { return page_; }
  StatusCells& status_cells() const { return *cells_; }
  // Returns the index in the status page of this rank or of a rank that shares memory with it; -1
  // for other ranks.
  int status_slot_of(int rank) const;
  // Returns whether the ranks of this host outnumber the cores that they may run on together.
  bool is_crowded() const { return is_crowded_; }
  // Returns whether these ranks are on this host and share its memory.
  bool share_memory(std::span<const int> ranks) const;

  // Returns the indices of the slots that these ranks of this host have in the host's memory.
  std::vector<int> slots_of(std::span<const int> ranks) const;
  // Publishes the places of this rank, waits for those of the other ranks of its host, and returns
  // them in the order of the ranks. Used by the group of all ranks, which has no parent group to
  // exchange them over. Calls `check` while it waits, and returns the first error of `check`.
  // REQUIRES: host_memory().
  Result<std::vector<GroupPlaces>> exchange_places(const GroupPlaces& own,
                                                   const std::function<Status()>& check,
                                                   Deadline deadline);

  // A group calls join_group() when it starts using the fabric, and leave_group() when it stops.
  // When the last group has left, the fabric announces to all ranks that this process leaves, waits
  // until the deadline for their acknowledgements, and closes all connections.
  void join_group();
  void leave_group(Deadline deadline);

 private:
  Status connect_ranks(const Membership& membership, const FabricSettings& settings,
                       Deadline deadline);
  void close(Deadline deadline);
  void withdraw_memory();
  void start_plane(FabricConnections connections, const Membership& membership,
                   const FabricSettings& settings);
  std::vector<std::unique_ptr<os::Pollable>> watch_processes(LogSink* log) const;
  std::vector<GroupActivity> last_activities(int rank) const;

  os::System& system_;
  const Rank rank_;
  const std::shared_ptr<const os::ForkMark> fork_mark_;  // shared with the groups and their Works
  std::string settings_;
  FlightFiles flight_files_;
  std::shared_ptr<const Layout> layout_;     // shared with the control plane and the groups
  std::shared_ptr<HostMemory> host_memory_;  // shared with pieces that outlive the fabric
  const std::shared_ptr<LateErrors> late_errors_ = std::make_shared<LateErrors>();
  std::string obstacle_;
  std::shared_ptr<LogSink> log_;  // shared with the groups; if null, log lines are dropped
  bool is_crowded_ = false;
  StatusPage page_;
  std::unique_ptr<StatusCells> cells_;
  std::shared_ptr<TcpLinks> links_;  // shared with the callback that the control plane calls
  std::unique_ptr<ControlPlane> plane_;
  std::atomic<int> num_groups_{0};
  bool is_closed_ = false;  // set by the last group to close, or by the destructor
};

}  // namespace cadre
