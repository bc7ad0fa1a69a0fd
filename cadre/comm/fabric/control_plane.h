// The control plane of a process: which ranks of the job are lost or left, what became of groups,
// and what their members do.
//
// A process has control connections to the ranks of its host and to some of other hosts
// (topology.h). What is told over them is state, which each process passes on once. A connection
// that is missing, because a rank is lost or was never there, is opened anew.
//
// Threads: one of its own ("cadre-monitor"), joined by close(), and short-lived ones that open
// connections; all methods from any thread, but close() from one.
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

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/log.h"
#include "cadre/comm/bootstrap/handshake.h"
#include "cadre/comm/fabric/control_link.h"
#include "cadre/comm/fabric/group_events.h"
#include "cadre/comm/fabric/layout.h"
#include "cadre/os/system.h"

namespace cadre {

class PlaneLoop;
class PlaneState;

struct StatusAnswer {
  int rank = -1;
  wire::Activity activity;
  bool has_left = false;  // the fabric, in good order; then it has no activity
};

class ControlPlane {
 public:
  struct Setup {
    std::shared_ptr<const Layout> layout;  // shared with the fabric and its groups
    int rank = 0;
    LinkTerms terms;
    // By rank, already proved; null where there is none yet. May be empty.
    std::vector<std::unique_ptr<os::Socket>> control;
    std::vector<std::unique_ptr<os::Listener>> tcp_listeners;
    std::unique_ptr<os::Listener> unix_listener;  // may be null
    // By rank; null where a process is not watched. May be empty.
    std::vector<std::unique_ptr<os::Pollable>> processes;
    // At which this rank reaches the store: which of several addresses of a card to take.
    std::string store_host;
    Duration silence_limit{};
    std::shared_ptr<LogSink> log;  // shared with the groups; null: dropped
    // What a rank of this host did last, read from the status page; empty where it cannot be read.
    std::function<std::vector<GroupActivity>(int rank)> last_activities;
    // A data connection that a peer opened and that has proved itself. Called by the plane's
    // thread without a lock.
    std::function<void(int peer, std::unique_ptr<os::Socket>)> on_data_connection;
  };

  ControlPlane(os::System& system, Setup setup);
  // close() without a wait for receipts.
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // From now on the group's events come; what has come before (losses, leavings, its failure) is
  // delivered before attach() returns.
  void attach(GroupKey group, std::shared_ptr<GroupEvents> events);
  // A call that is under way may still end; the plane keeps the object that long.
  void detach(GroupKey group);
  bool is_attached(GroupKey group) const;
  // This rank left the group in good order after `num_collectives`, of which `last` was the last.
  void tell_left(GroupKey group, uint64_t num_collectives, const Fingerprint& last);
  // This rank found the group's first failure. Of several that are told, the one that a process
  // hears first is the one that it passes on.
  void tell_failure(GroupFailure failure);

  // Asks the members what they do in the group; returns when all have answered that are neither
  // lost nor left, or at the deadline. By rank; a member that is silent or lost is missing.
  std::vector<StatusAnswer> ask(GroupKey group, std::span<const int> members, Deadline deadline);

  std::vector<int> lost_ranks() const;  // ascending, without this rank
  std::optional<LossReport> loss_of(int rank) const;
  bool has_left(int rank) const;  // the fabric, in good order

  // Whether a rank of another host cannot be reached: it takes no connection before the deadline.
  // Its process is not asked, since the system accepts for it; a refusal is an answer. Any thread.
  bool is_cut_off(int peer, Deadline deadline);
  // Opens and proves a data connection to a peer; any thread.
  Result<std::unique_ptr<os::Socket>> dial_data(int peer, Deadline deadline);

  // Tells the peers that this process leaves in good order, waits for their receipts at most until
  // the deadline, sends what is pending (1 s at most), joins the thread and closes everything.
  // Idempotent.
  void close(Deadline deadline);

  ControlCounters counters() const { return meter_.read(); }

 private:
  os::System& system_;
  const std::shared_ptr<const Layout> layout_;
  const LinkTerms terms_;
  const std::string store_host_;
  ControlMeter meter_;
  std::unique_ptr<os::Event> wake_up_;
  std::unique_ptr<PlaneState> state_;
  std::unique_ptr<PlaneLoop> loop_;
  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre
