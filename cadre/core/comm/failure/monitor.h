// Collects the failures of one group, lets the FailureArbiter decide which of them becomes the
// failure of the group, and passes that failure to the threads and members of the group. Stores the
// known state of the peers. The ControlPlane, which watches connections and processes, delivers its
// events to the Monitor.
//
// Threads: none of its own; all methods from any thread, on_...() from the plane's. Blocking:
// ask_peers(), await_failure() and the methods that wait for a published failure, until their
// deadlines. While its mutex is locked, the Monitor calls no other object except Waiter::unpark().
// Lifetime: shared with the plane. The plane may deliver an event until shortly after stop(), and
// the leaves of other members until all have left; the Monitor shares ownership of what these
// deliveries use. Borrows the System and the plane. Errors: the group's failure, composed once; the
// first failure is published to all members, and later ones are ignored. Ranks are those of the
// group; in on_...() they are those of the fabric.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/failure/diagnosis.h"
#include "cadre/core/comm/failure/failure_arbiter.h"
#include "cadre/core/comm/failure/failure_links.h"
#include "cadre/core/comm/failure/group_ends.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/fabric/plane/group_events.h"
#include "cadre/core/fabric/plane/late_errors.h"
#include "cadre/core/fabric/status_page.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"
#include "cadre/core/wire/control.h"

namespace cadre {

struct MonitorSetup {
  Roster roster;
  GroupKey key = kNoGroup;
  // The key under which the group is created: a failure that is published under this key fails the
  // group, too. May be kNoGroup.
  GroupKey creation = kNoGroup;
  ControlPlane* plane = nullptr;  // null for a world of one
  // slots[r] is the slot of rank r in the status page; -1 if the rank is on another host.
  std::vector<int> slots;
  // Returns what this process runs in another group, for replies to status questions; may be null.
  std::function<std::string()> running_elsewhere = nullptr;
  // Called when a rank of the fabric has left the group; may be null. Shares ownership of what it
  // uses.
  std::function<void(int rank)> on_left = nullptr;
  // Called with the first failure of the group before any call throws it; may be null. Throws
  // nothing, and shares ownership of what it uses.
  std::function<void(const Error& failure)> on_failed = nullptr;
  // Receives errors that are found after close(). Shared with the fabric.
  std::shared_ptr<LateErrors> late_errors = std::make_shared<LateErrors>();
  std::string record_path;
  std::shared_ptr<LogSink> log;  // the group uses it, too; if null, log lines are dropped
};

class Monitor final : public GroupEvents, public std::enable_shared_from_this<Monitor> {
 public:
  // How long a rank whose operation timed out polls its peers before it names one of them. If their
  // answers do not identify the culprit, it then tries for as long to connect to the awaited rank.
  static constexpr Duration kAskTime = std::chrono::milliseconds(600);
  // How long a rank with an uncertain suspect waits for another rank to publish a certain one:
  // longer than kAskTime, so that the other rank has finished polling or connecting.
  static constexpr Duration kDoubtTime = std::chrono::milliseconds(1000);
  // The longest time by which another rank is assumed to have entered its operation later than this
  // rank, so that its deadline is later, too.
  static constexpr Duration kMaxLag = std::chrono::seconds(2);
  // How long an operation waits, after the end of a stream, for the event that explains the end.
  static constexpr Duration kVerdictTime = std::chrono::milliseconds(500);

  // This rank publishes its activity in `cell`, which is in the status page of its host.
  Monitor(os::System& system, MonitorSetup setup, StatusPage page, std::shared_ptr<GroupCell> cell);

  // Starts the delivery of events. Earlier events of the group are delivered before it returns.
  void start();
  // Stops the delivery of events; a delivery that has begun may still end. After publish_leave()
  // events are still delivered until all members have left or failed. Idempotent.
  void stop();
  // Copies the present content of the status page and releases the page's memory. REQUIRES: stop();
  // no operation runs any more.
  void release_page();

  const Roster& roster() const { return setup_.roster; }
  // Returns the cell in which this rank publishes its activity. REQUIRES: called before
  // release_page(), by a thread that runs an operation of the group.
  GroupCell& own_cell() const { return *cell_; }
  // Returns the flag that the group's first failure raises.
  os::Interrupt& interrupt() { return interrupt_; }

  // Called when this rank enters a collective. Fails the group if a peer has left before that
  // collective.
  void enter_collective(uint64_t number);
  void leave_collective();

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  // REQUIRES: has_failed(). Returns the same error each time, with one exception: it no longer
  // names a collective that was running when the failure arrived and has succeeded since.
  Error error();
  // Fails the group, unless it has failed already or another thread investigates its failure.
  void fail(const Failure& failure);
  // Lets the first caller investigate, and fails the group with its finding. If `investigate`
  // throws, the exception is the failure and this rank the culprit. Returns at once for all later
  // callers.
  void fail_after(const std::function<Finding()>& investigate);
  // Describes an operation that has reached its deadline.
  struct Overdue {
    wire::Activity activity;
    std::optional<uint64_t> number = {};  // is set for a collective
    int waiting_for = -1;
    std::string where = {};  // for example "tag 5"; empty for a collective
  };
  // Polls all peers and names the rank that is late. The answers may be routed over other hosts. If
  // they do not identify the culprit, this rank tries to connect to the awaited rank directly.
  void fail_by_timeout(const Overdue& overdue);
  // Waits until the group has failed, or `peer` (-1 for none) is known to have left. An operation
  // whose stream has ended waits here for the event that explains it.
  void await_failure(int peer, Deadline deadline);
  // Waits until the claimed failure is published, and returns its error.
  Error published_failure();
  struct EndOfStream {
    int culprit = -1;
    std::string cause;
  };
  // Returns the reason why the stream to `peer` ended with `error`. The control connections report
  // whether the peer was killed, left or failed before. Without such a report only this stream was
  // cut. Returns nullopt if the group has failed meanwhile.
  std::optional<EndOfStream> why_stream_ended(int peer, const Error& error);

  // Links two groups of this process so that they fail together: a failure of one, also an earlier
  // one, is the first failure of the other, unless the other is being left. Every process that is
  // in both groups links them. Both keep only weak references.
  static void link(const std::shared_ptr<Monitor>& one, const std::shared_ptr<Monitor>& other);
  // Called when the linked group `theirs` has failed. A group that is being left only passes the
  // failure on to its other linked groups.
  void fail_with(const FirstFailure& first, const Roster& theirs, VisitedGroups& visited);

  // Returns what this rank knows about each member, indexed by rank.
  std::vector<PeerView> peers() const;
  // Asks all members for their status. Returns the result of peers() when all have answered or at
  // the deadline.
  std::vector<PeerView> ask_peers(Deadline deadline);

  // Calls MonitorSetup::on_left for a rank of the fabric.
  void note_left(int rank) const {
    if (setup_.on_left) setup_.on_left(rank);
  }
  // Publishes to all members that this rank leaves after `number` collectives, unless the group has
  // failed. Compares the last collective of this rank with those of the members, now or when they
  // leave. In a failed group it compares only if that collective succeeded and the failure was the
  // leave of a member. Blocks only while another thread investigates the failure of the group, at
  // most until the deadline: members that received the leave before the failure would take this
  // rank for lost.
  void publish_leave(uint64_t number, Deadline deadline);

  void on_rank_lost(const LossReport& loss) override;
  void on_rank_left_group(const wire::GroupLeave& leave) override;
  void on_group_failed(const GroupFailure& failure) override;
  std::optional<wire::Activity> own_activity() override;

 private:
  struct Peer {
    // The peer has published a failure, or has left the job but not this group.
    bool has_aborted = false;
    bool is_gone = false;
    bool answers = false;  // the peer has replied to the last status question
    std::optional<uint64_t> left_after;
    // The sign by which the peer was found to be lost after it had left the group, which is no
    // failure of this group.
    std::optional<SignOfLoss> ended_by;
    std::optional<wire::Activity> reported;
    TimePoint reported_at;
    std::string elsewhere;
  };

  // Publishes the failure. Called once, by the thread that has claimed the failure.
  void publish(const Failure& failure, VisitedGroups& visited);
  void end_waits(ExplainedFailure explained);
  // Returns cell_. The control plane's thread calls it, too, possibly during release_page().
  std::shared_ptr<GroupCell> shared_cell() const;
  // Returns the failure as linked groups need it; nullopt if the group is closed. Defined, like
  // link() and fail_with(), in failure_links.cpp.
  std::optional<FirstFailure> first_failure(const Failure& failure, std::string sentence) const;
  int group_rank(int fabric_rank) const;  // Returns -1 for a rank that is no member.
  std::optional<EndOfStream> loss_after_leaving() const;
  void report_activity(int peer, const wire::Activity& activity);
  void fail_as_reported_lost(const LossReport& loss);
  void publish_to_members(const Failure& failure, const std::string& sentence);
  void fail_if_left_before(uint64_t number);
  PeerView view_of(size_t rank, TimePoint now) const;  // REQUIRES: mutex_ is locked.
  void report_mismatch();
  void detach() const {
    if (setup_.plane == nullptr) return;
    setup_.plane->detach(setup_.key);
    if (setup_.creation != kNoGroup) setup_.plane->detach(setup_.creation);
  }
  // Detaches from the plane if all members have left or failed after stop(), so that no further
  // event matters.
  void detach_if_over();
  // Waits until `is_met` returns true, at most until the deadline. `is_met` is called under the
  // lock.
  void await(const std::function<bool(TimePoint now)>& is_met, Deadline deadline);
  void wake_observers() {
    for (os::Waiter* observer : observers_) observer->unpark();
  }
  LogSink& log() const { return setup_.log != nullptr ? *setup_.log : null_log_sink(); }

  os::System& system_;
  const MonitorSetup setup_;
  os::Interrupt interrupt_;
  FailureLinks links_;
  std::shared_ptr<GroupCell> cell_;  // the status page uses it, too, until release_page()

  std::atomic<bool> has_failed_{false};
  std::atomic<uint64_t> running_number_{0};  // the number of the running collective; 0 if none runs
  std::atomic<uint64_t> first_left_{UINT64_MAX};  // the smallest left_after of all peers

  mutable std::mutex mutex_;
  std::vector<Peer> peers_;  // peers_[r] is the peer with rank r
  GroupEnds ends_;
  // The number of failures of this process's groups before this group was made.
  const uint64_t num_earlier_failures_;
  bool has_failed_by_leave_ =
      false;  // the failure is that a member left before a collective of this rank
  FailureArbiter arbiter_;
  bool has_asked_ = false;
  bool is_leaving_ = false;
  bool is_stopped_ = false;
  std::optional<StatusPage> page_;  // the status page of this host; nullopt after release_page()
  std::vector<os::Waiter*> observers_;
};

}  // namespace cadre
