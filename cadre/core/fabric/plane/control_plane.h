// The control plane of a process: distributes which ranks of the job are lost or have left and
// which groups have failed, and answers what the members of a group do.
//
// A process has control connections to the ranks of its host and to some of other hosts
// (topology.h). Events sent over them describe state, and each process forwards each event once. A
// connection that is missing, because a rank is lost or was never connected, is opened again.
//
// Threads: one of its own ("cadre-monitor"), joined by close(), and short-lived ones that open
// connections; all methods from any thread, except that only one thread may call close().
// Blocking: ask(), dial_data() and close() until their deadlines; close() for 2 s more at most.
// Lifetime: borrows the System; the layout and the groups' events are shared. Errors: as each
// method says. All ranks are those of the fabric.
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
  bool has_left = false;  // the rank left the fabric in good order, so it has no activity
};

class ControlPlane {
 public:
  struct Setup {
    std::shared_ptr<const Layout> layout;  // the fabric and its groups use it, too
    int rank = 0;
    LinkIdentity identity;
    // control[r] is the connection to rank r after the handshake; null if there is none yet. May be
    // empty.
    std::vector<std::unique_ptr<os::Socket>> control;
    std::vector<std::unique_ptr<os::Listener>> tcp_listeners;
    std::unique_ptr<os::Listener> unix_listener;  // is null if this rank has no unix listener
    // processes[r] is the watched process of rank r; null if it is not watched. May be empty.
    std::vector<std::unique_ptr<os::Pollable>> processes;
    // The address of the store's host as this rank reaches it. If a peer has several addresses,
    // this rank dials the one with this host.
    std::string store_host;
    Duration silence_limit{};
    std::shared_ptr<LogSink> log;  // the groups use it, too; if null, log lines are dropped
    // Reads the last activities of a rank of this host from the status page; empty if they cannot
    // be read.
    std::function<std::vector<GroupActivity>(int rank)> last_activities;
    // Receives a data connection that a peer opened, after the handshake. Called by the plane's
    // thread without a lock.
    std::function<void(int peer, std::unique_ptr<os::Socket>)> on_data_connection;
  };

  ControlPlane(os::System& system, Setup setup);
  // Closes the plane without waiting for receipts.
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // Starts the delivery of the group's events. Earlier ones (losses, leaves, its failure) are
  // delivered before attach() returns.
  void attach(GroupKey group, std::shared_ptr<GroupEvents> events);
  // A delivery that has begun may still end; the plane keeps the object until then.
  void detach(GroupKey group);
  bool is_attached(GroupKey group) const;
  // Publishes that this rank left the group in good order after `num_collectives`, of which `last`
  // was the last.
  void tell_left(GroupKey group, uint64_t num_collectives, const Fingerprint& last);
  // Publishes the group's failure that this rank found. If a group has several failures, each
  // process forwards only the first that it receives.
  void tell_failure(GroupFailure failure);

  // Asks the members what they do in the group. Returns when all members that are neither lost nor
  // left have answered, or at the deadline. The answers are in the order of `members`, without
  // those of silent and lost members.
  std::vector<StatusAnswer> ask(GroupKey group, std::span<const int> members, Deadline deadline);

  // Returns the lost ranks in ascending order, without this rank.
  std::vector<int> lost_ranks() const;
  std::optional<LossReport> loss_of(int rank) const;
  bool has_left(int rank) const;  // Returns whether the rank has left the fabric in good order.

  // Returns whether no TCP connection to a rank of another host can be opened before the deadline.
  // The kernel of that host accepts the connection, so a stopped process counts as reachable, as
  // does a host that rejects the connection. Any thread may call it.
  bool is_cut_off(int peer, Deadline deadline);
  // Opens a data connection to a peer and performs the handshake. Any thread may call it.
  Result<std::unique_ptr<os::Socket>> dial_data(int peer, Deadline deadline);

  // Publishes that this process leaves in good order, waits for the peers' receipts until the
  // deadline, sends pending bytes (1 s at most), joins the thread and closes all connections.
  // Idempotent.
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
