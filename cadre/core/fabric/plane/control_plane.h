// The control plane of a process. It distributes which ranks of the job are lost or have left and
// which groups have failed, and asks the members of a group which operations they run.
//
// A process has control connections to the ranks of its host and to some of other hosts
// (topology.h). Each process forwards each event once; receiving an event twice has no effect. When
// ranks are lost or leave, connections to new neighbours are opened.
//
// Threads: the plane has one thread ("cadre-monitor"), which close() joins, and short-lived ones
// that open connections. Any thread may call all methods, but only one may call close().
// Blocking: ask(), dial_data() and close() until their deadlines; close() at most 2 s longer.
// Lifetime: borrows the System; shares the layout and the GroupEvents of the groups. Errors: as
// each method says. All rank numbers are those of the fabric.
// Format: docs/formats/control-messages.md.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/fabric/plane/control_link.h"
#include "cadre/core/fabric/plane/group_events.h"
#include "cadre/core/os/system.h"

namespace cadre {

class PlaneLoop;
class PlaneState;

struct StatusAnswer {
  int rank = -1;
  wire::Activity activity;
  bool has_left = false;  // the rank left the fabric without a failure, so it has no activity
};

class ControlPlane {
 public:
  struct Setup {
    std::shared_ptr<const Layout> layout;  // shared with the fabric and its groups
    int rank = 0;
    LinkIdentity identity;
    // control[r] is the connection to rank r after the handshake; null if there is none yet. May be
    // empty.
    std::vector<std::unique_ptr<os::Socket>> control;
    std::vector<std::unique_ptr<os::Listener>> tcp_listeners;
    std::unique_ptr<os::Listener> unix_listener;  // is null if this rank has no unix listener
    // processes[r] becomes ready when the process of rank r ends; null if that process is not
    // watched. May be empty.
    std::vector<std::unique_ptr<os::Pollable>> processes;
    // The host part of the address at which this rank reaches the store. If a peer has several
    // addresses, this rank prefers the one with this host.
    std::string store_host;
    Duration silence_limit{};
    // Returns the ranks whose hosts the launcher has lost; may be null. The plane's thread calls it
    // in each kStatusInterval.
    std::function<std::vector<Rank>()> lost_ranks = nullptr;
    std::shared_ptr<LogSink> log;  // shared with the groups; if null, log lines are dropped
    // Reads the last activities of a rank of this host from the status page; returns an empty list
    // if they cannot be read.
    std::function<std::vector<GroupActivity>(int rank)> last_activities;
    // Called with each data connection that a peer has opened, after its handshake. The plane's
    // thread calls it without a lock.
    std::function<void(int peer, std::unique_ptr<os::Socket>)> on_data_connection;
  };

  ControlPlane(os::System& system, Setup setup);
  // Closes the plane without waiting until the peers acknowledge that this process leaves.
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // Starts the delivery of the group's events to `events`. Events that arrived earlier (lost ranks,
  // ranks that have left, the group's failure) are delivered before attach() returns.
  void attach(GroupKey group, std::shared_ptr<GroupEvents> events);
  // Ends the delivery of events. A delivery that is in progress may end after detach() returns; the
  // plane keeps the object until then.
  void detach(GroupKey group);
  bool is_attached(GroupKey group) const;
  // Tells all ranks that this rank left the group without a failure, after `num_collectives`
  // collectives. `last` is the fingerprint of the last one.
  void tell_left(GroupKey group, uint64_t num_collectives, const Fingerprint& last);
  // Publishes a failure of the group, which this rank has detected, to all ranks. If a group has
  // several failures, each process forwards only the first that it receives.
  void tell_failure(GroupFailure failure);

  // Asks the members which operation of the group they run. Returns when all members that are
  // neither lost nor left have answered, or at the deadline. The answers are in the order of
  // `members`; members that are lost or did not answer have none.
  std::vector<StatusAnswer> ask(GroupKey group, std::span<const int> members, Deadline deadline);

  // Returns the lost ranks in ascending order, without this rank.
  std::vector<int> lost_ranks() const;
  std::optional<LossReport> loss_of(int rank) const;
  bool has_left(int rank) const;  // whether the rank has left the fabric without a failure

  // Returns whether no TCP connection to a rank of another host can be opened before the deadline.
  // A stopped process counts as reachable, because the kernel of its host accepts the connection. A
  // host that refuses the connection counts as reachable, too.
  bool is_cut_off(int peer, Deadline deadline);
  // Opens a data connection to a peer and performs the handshake.
  Result<std::unique_ptr<os::Socket>> dial_data(int peer, Deadline deadline);

  // Announces to all ranks that this process leaves without a failure, waits until the deadline for
  // the peers' acknowledgements, sends pending bytes (1 s at most), joins the thread and closes all
  // connections. Idempotent.
  void close(Deadline deadline);

  ControlCounters counters() const { return meter_.read(); }

 private:
  os::System& system_;
  const std::shared_ptr<const Layout> layout_;
  const LinkIdentity identity_;
  const std::string store_host_;
  ControlMeter meter_;
  std::unique_ptr<os::Event> wake_up_;
  std::unique_ptr<PlaneState> state_;
  std::unique_ptr<PlaneLoop> loop_;
  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre
