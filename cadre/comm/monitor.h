// Watches the other ranks of a group over their control connections: who is gone, who left in good
// order, who failed first, who does what. Holds the group's one failure.
//
// Threads: one of its own ("cadre-monitor"), joined by stop(); all methods from any thread.
// Blocking: ask_peers, await_failure and say_goodbye, until their deadlines; stop() for at most
// kFlushTime. Never calls out under its lock but to unpark.
// Lifetime: borrows the System and the Interrupt. Errors: the group's failure, composed once; the
// first failure wins and is told to all peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/log.h"
#include "cadre/base/types.h"
#include "cadre/comm/defaults.h"
#include "cadre/comm/diagnosis.h"
#include "cadre/comm/status_page.h"
#include "cadre/os/interrupt.h"
#include "cadre/os/system.h"
#include "cadre/wire/control.h"

namespace cadre {

struct MonitorSetup {
  Roster roster;
  StatusPage page;
  std::vector<int> slots;  // in the page, by rank; -1 for ranks of other hosts
  std::vector<std::unique_ptr<os::Socket>> control;  // by rank, null for this one
  // By rank; null where the process cannot be watched. A child that it forked may hold copies of
  // its connections, which do not end with it then.
  std::vector<std::unique_ptr<os::Pollable>> processes;
  std::string record_path;
  LogSink& log;
  Duration silence_limit = kDefaultSilenceLimit;  // of ranks without a slot
};

class Monitor {
 public:
  // How long a rank that timed out waits for its peers' answers before it names one of them.
  static constexpr Duration kAskTime = std::chrono::milliseconds(600);
  // How long a rank that can only guess waits for one that knows: longer than that one asks.
  static constexpr Duration kDoubtTime = std::chrono::milliseconds(1000);
  // How long a broken stream may be older than the news of what broke it.
  static constexpr Duration kVerdictTime = std::chrono::milliseconds(500);
  // How long the last words of a process that has ended may be on their way.
  static constexpr Duration kLastWordsTime = std::chrono::milliseconds(100);

  Monitor(os::System& system, os::Interrupt& interrupt, MonitorSetup setup);
  ~Monitor();

  const Roster& roster() const { return roster_; }
  // Where this rank publishes what it does.
  StatusSlot& own_slot() const { return page_.slot(own_slot_index_); }

  // This rank enters a collective: fails the group if a peer left before it.
  void enter_collective(uint64_t number);
  void leave_collective();

  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  // REQUIRES: has_failed(). The same each time, but that it does not name a collective which was
  // running when the news came and has ended well since.
  Error error();
  // Fails the group, unless it has failed or somebody is about to say why.
  void fail(const Failure& failure);
  // The right to be the first failure, so that there is time to find out why: true for the first
  // caller only, who must call publish().
  bool claim_failure();
  void publish(const Failure& failure);
  // Publishes it, but what another rank says within `patience` takes its place: it may know better.
  void publish_unless_told(const Failure& failure, Duration patience);
  // Until the group has failed, or `peer` (-1 for none) is known to have left; an operation that
  // found a broken stream learns here what it means.
  void await_failure(int peer, Deadline deadline);
  // The failure that was claimed, once it is published.
  Error published_failure();
  // Why the stream to `peer` ended with `error`: the control connection tells whether it was
  // killed, left or failed first; if that stays open and silent, only this stream was cut. nullopt
  // when the group has failed meanwhile.
  std::optional<std::string> why_stream_ended(int peer, const Error& error);

  // What is known of every rank, by rank.
  std::vector<PeerView> peers() const;
  // The same after asking all; returns when all have answered, or at the deadline.
  std::vector<PeerView> ask_peers(Deadline deadline);

  // Tells all peers that this rank leaves after `number` collectives; returns when all know it, or
  // at the deadline. Ends of connections are no failures any more.
  void say_goodbye(uint64_t number, Deadline deadline);
  // Sends what is pending and joins the thread. Idempotent.
  void stop();

 private:
  static constexpr Duration kFlushTime = std::chrono::seconds(1);
  enum class FailurePhase { kNone, kClaimed, kPublished };

  struct Peer {
    std::unique_ptr<os::Socket> socket;     // null for this rank; used by the thread only
    std::unique_ptr<os::Pollable> process;  // the thread's; null when it is not watched any more
    std::optional<TimePoint> ended_at;      // the process; the thread's
    wire::ControlSplitter splitter;         // the thread's
    Duration silent_for{0};                 // the thread's
    std::vector<std::byte> sending;         // the thread's
    std::vector<std::byte> outbox;          // guarded, as all below
    bool is_connected = false;
    bool has_aborted = false;
    bool is_gone = false;
    bool has_receipt = false;
    std::optional<uint64_t> left_after;
    uint64_t answered_request = 0;
    std::optional<wire::Activity> reported;
    TimePoint reported_at;
  };

  void run();
  Deadline next_look(TimePoint now) const;
  std::vector<os::PollItem> interests();
  void receive_from(int rank);
  void bury_ended(TimePoint now);
  void judge_silence(TimePoint now);
  void handle(int rank, const wire::ControlMessage& message);
  void handle_report(int rank, const wire::StatusReport& report);
  void handle_request(int rank, const wire::StatusRequest& request);
  void handle_abort(int rank, const wire::AbortNotice& notice);
  void answer_accusation();
  void handle_goodbye(int rank, const wire::Goodbye& goodbye);
  void handle_end(int rank, SignOfLoss sign);
  void flush();
  void send_heartbeats(TimePoint now);
  bool is_flushed();
  void post(int rank, const wire::ControlMessage& message);
  void post_to_all(const wire::ControlMessage& message);
  void fail_if_left_before(uint64_t number);
  PeerView view_of(size_t rank, TimePoint now) const;  // under the lock
  void settle_blame(TimePoint now);                    // under the lock
  bool await(const std::function<bool()>& is_met, Deadline deadline);
  void wake_observers();

  os::System& system_;
  os::Interrupt& interrupt_;
  const Roster roster_;
  const StatusPage page_;
  const std::vector<int> slots_;
  const int own_slot_index_;
  const std::string record_path_;
  LogSink& log_;
  const std::unique_ptr<os::Event> wake_up_;

  std::atomic<bool> has_failed_{false};
  std::atomic<uint64_t> running_number_{0};       // of the collective, 0 for none
  std::atomic<uint64_t> first_left_{UINT64_MAX};  // the least left_after of all peers

  mutable std::mutex mutex_;
  std::vector<Peer> peers_;  // by rank
  FailurePhase failure_phase_ = FailurePhase::kNone;
  Failure failure_;  // that error_ tells
  std::optional<Error> error_;
  // The failure was put down to a collective that ran when the news came; it may yet end well.
  bool is_blame_open_ = false;
  std::optional<Failure> told_;  // what came while the failure was claimed
  uint64_t num_requests_ = 0;
  bool is_leaving_ = false;
  bool is_stopping_ = false;
  TimePoint stop_by_;
  std::vector<os::Waiter*> observers_;

  const Duration silence_limit_;
  TimePoint last_heartbeat_;  // the thread's, as the next
  TimePoint silence_judged_at_;
  // A notice that this rank is lost; the thread's.
  std::optional<wire::AbortNotice> accusation_;
  std::unique_ptr<os::Thread> thread_;
};

}  // namespace cadre
