// Arbitrates the failures of one group: which failure is the first, what its peers are known to do,
// and the Error that every later call throws. Connections and processes are watched by the
// ControlPlane, whose events arrive here.
//
// Threads: none of its own; all methods from any thread, on_... from the plane's. Blocking:
// ask_peers, await_failure and what waits for a published failure, until their deadlines. Never
// calls out under its lock but to unpark. Lifetime: shared with the plane, which may deliver an
// event until shortly after stop(), and the leaves of other members as long as those take; shares
// what it uses then. Borrows the System and the plane. Errors: the group's failure, composed once;
// the first failure wins and is told to all members. Ranks are those of the group, in on_... those
// of the fabric.
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

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/log.h"
#include "cadre/base/types.h"
#include "cadre/comm/defaults.h"
#include "cadre/comm/diagnosis.h"
#include "cadre/comm/fabric/control_plane.h"
#include "cadre/comm/fabric/group_events.h"
#include "cadre/comm/fabric/late_errors.h"
#include "cadre/comm/group_ends.h"
#include "cadre/comm/status_page.h"
#include "cadre/os/interrupt.h"
#include "cadre/os/system.h"
#include "cadre/wire/control.h"

namespace cadre {

struct MonitorSetup {
  Roster roster;
  GroupKey key = 0;
  ControlPlane* plane = nullptr;  // null for a world of one
  std::vector<int> slots;         // in the page, by rank of the group; -1 for ranks of other hosts
  // What this process runs in another group, for peers that ask; may be null.
  std::function<std::string()> running_elsewhere = nullptr;
  // A rank of the fabric has left the group; may be null. Shares what it uses.
  std::function<void(int rank)> on_left = nullptr;
  // Where an error goes that is found after close(). Shared with the fabric.
  std::shared_ptr<LateErrors> late_errors = std::make_shared<LateErrors>();
  std::string record_path;
  std::shared_ptr<LogSink> log;  // shared with the group; null: dropped
};

class Monitor final : public GroupEvents, public std::enable_shared_from_this<Monitor> {
 public:
  // How long a rank that timed out waits for its peers' answers before it names one of them, and,
  // if they do not tell, for the connection that shows whether the awaited rank can be reached.
  static constexpr Duration kAskTime = std::chrono::milliseconds(600);
  // How long a rank that can only guess waits for one that knows: longer than that one asks
  // or tries to connect.
  static constexpr Duration kDoubtTime = std::chrono::milliseconds(1000);
  // How much later such a rank may have entered its operation, and reach its deadline.
  static constexpr Duration kMaxLag = std::chrono::seconds(2);
  // How long a broken stream may be older than the news of what broke it.
  static constexpr Duration kVerdictTime = std::chrono::milliseconds(500);

  // `cell` is where this rank publishes what it does, in the page of its host.
  Monitor(os::System& system, MonitorSetup setup, StatusPage page, std::shared_ptr<GroupCell> cell);

  // Begins to receive events; those that came before are delivered before it returns.
  void start();
  // No event arrives any more that began after the return; but after a goodbye the leaves of the
  // members still do, until all have left. Idempotent.
  void stop();
  // Keeps what the status page says just now and lets go of the page's memory. REQUIRES: stop(); no
  // operation runs any more.
  void release_page();

  const Roster& roster() const { return setup_.roster; }
  // Where this rank publishes what it does.
  // REQUIRES: before release_page(), by a thread that runs an operation of the group.
  GroupCell& own_cell() const { return *cell_; }
  // Raised by the group's first failure.
  os::Interrupt& interrupt() { return interrupt_; }

  // This rank enters a collective: fails the group if a peer left before it.
  void enter_collective(uint64_t number);
  void leave_collective();

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  // REQUIRES: has_failed(). The same each time, but that it does not name a collective which was
  // running when the news came and has ended well since.
  Error error();
  // Fails the group, unless it has failed or somebody is about to say why.
  void fail(const Failure& failure);
  // What an investigation has found. What another rank says within `patience` takes its place: it
  // may know better.
  struct Finding {
    Failure failure;
    Duration patience{0};
  };
  // The same with time to find out why: the first caller investigates and fails the group with what
  // it finds; an exception of it is then this rank's failure. For all others does nothing.
  void fail_after(const std::function<Finding()>& investigate);
  // An operation that reached its deadline.
  struct Overdue {
    wire::Activity activity;
    std::optional<uint64_t> number = {};  // of a collective
    int waiting_for = -1;
    std::string where = {};  // "tag 5"; empty for a collective
  };
  // Asks the others what they are doing, and names the rank that is late. Where their answers,
  // which may come by way of other hosts, do not tell, it tries to reach the awaited rank itself.
  void fail_by_timeout(const Overdue& overdue);
  // Until the group has failed, or `peer` (-1 for none) is known to have left; an operation that
  // found a broken stream learns here what it means.
  void await_failure(int peer, Deadline deadline);
  // The failure that was claimed, once it is published.
  Error published_failure();
  struct EndOfStream {
    int culprit = -1;
    std::string cause;
  };
  // Why the stream to `peer` ended with `error`: the control connections tell whether it was
  // killed, left or failed first; if they stay silent, only this stream was cut. nullopt when the
  // group has failed meanwhile.
  std::optional<EndOfStream> why_stream_ended(int peer, const Error& error);

  // What is known of every rank, by rank.
  std::vector<PeerView> peers() const;
  // The same after asking all; returns when all have answered, or at the deadline.
  std::vector<PeerView> ask_peers(Deadline deadline);

  // Passes on that a rank of the fabric has left.
  void note_left(int rank) const {
    if (setup_.on_left) setup_.on_left(rank);
  }
  // Tells all members that this rank leaves after `number` collectives, unless the group has
  // failed, and compares the last one, if it ended well, with theirs, now or when they leave. Never
  // blocks.
  void say_goodbye(uint64_t number);

  void on_rank_lost(const LossReport& loss) override;
  void on_rank_left_group(const wire::GroupLeave& leave) override;
  void on_group_failed(const GroupFailure& failure) override;
  std::optional<wire::Activity> own_activity() override;

 private:
  enum class FailurePhase { kNone, kClaimed, kPublished };

  struct Peer {
    bool has_aborted = false;  // it said so, or left the job without a leave of this group
    bool is_gone = false;
    bool answers = false;  // the last question
    std::optional<uint64_t> left_after;
    std::optional<SignOfLoss> ended_by;  // after it left, which is no failure here
    std::optional<wire::Activity> reported;
    TimePoint reported_at;
    std::string elsewhere;
  };

  // The right to be the first failure: true for the first caller only, who must publish.
  bool claim_failure();
  void publish(const Failure& failure);
  void publish_explained(const Failure& failure);
  // By the control plane's thread, too, which may come while release_page() runs.
  std::shared_ptr<GroupCell> shared_cell() const;
  int group_rank(int fabric_rank) const;  // -1 for a rank that is no member
  std::optional<EndOfStream> loss_after_leaving() const;
  void report_activity(int peer, const wire::Activity& activity);
  void answer_accusation(const LossReport& loss);
  void tell_members(const Failure& failure, const std::string& sentence);
  void fail_if_left_before(uint64_t number);
  PeerView view_of(size_t rank, TimePoint now) const;  // under the lock
  void settle_blame(TimePoint now);                    // under the lock
  void tell_disagreement();
  // All members have left or failed since this rank did, so no event matters any more.
  void detach_if_over();
  bool await(const std::function<bool()>& is_met, Deadline deadline);
  void wake_observers();
  LogSink& log() const { return setup_.log != nullptr ? *setup_.log : null_log_sink(); }

  os::System& system_;
  const MonitorSetup setup_;
  os::Interrupt interrupt_;
  std::shared_ptr<GroupCell> cell_;  // shared with the page until release_page()

  std::atomic<bool> has_failed_{false};
  std::atomic<uint64_t> running_number_{0};       // of the collective, 0 for none
  std::atomic<uint64_t> first_left_{UINT64_MAX};  // the least left_after of all peers

  mutable std::mutex mutex_;
  std::vector<Peer> peers_;  // by rank
  GroupEnds ends_;
  // Failures of this process's groups before this one was made.
  const uint64_t num_earlier_failures_;
  bool has_failed_by_leave_ = false;  // a member left before a collective of this rank
  FailurePhase failure_phase_ = FailurePhase::kNone;
  Failure failure_;  // that error_ tells
  std::optional<Error> error_;
  // The failure was put down to a collective that ran when the news came; it may yet end well.
  bool is_blame_open_ = false;
  std::optional<Failure> told_;  // what came while the failure was claimed
  bool has_asked_ = false;
  bool is_leaving_ = false;
  bool is_stopped_ = false;
  std::optional<StatusPage> page_;  // of this host; none after release_page()
  std::vector<os::Waiter*> observers_;
};

}  // namespace cadre
