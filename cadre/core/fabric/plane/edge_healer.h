// Maintains the control connections that the topology requires: opens those that are missing,
// accepts those that peers open, and reports ranks that cannot be reached.
//
// Threads: the control plane's. Blocking: stop(), for a second at most. Lifetime: borrows the
// System, the plan, the event and the log; owns the listeners. Errors: none; advance() reports
// verdicts.
// If a connection is missing, the end with the higher rank dials at once, the other one after 1 s.
// If both succeed, both connections are kept.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/fabric/bootstrap/callers.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/fabric/plane/dialer.h"
#include "cadre/core/os/system.h"

namespace cadre {

class EdgeHealer {
 public:
  // The time for which the end with the lower rank waits until the other end opens the connection.
  static constexpr Duration kCallTime = std::chrono::seconds(1);
  // If a rank no longer listens, the event that it has left may take this long to arrive.
  static constexpr Duration kLeaveNewsTime = std::chrono::seconds(1);
  // The pause after a loss, since several losses often occur together.
  static constexpr Duration kLossPause = std::chrono::milliseconds(50);
  // The pause after a leave, since the ranks of a job that ends leave together. The topology stays
  // connected without one rank meanwhile.
  static constexpr Duration kLeavePause = std::chrono::seconds(1);
  // A leaving rank waits for this time before it connects to new neighbours, since events may
  // arrive meanwhile that say that these neighbours have left, too.
  static constexpr Duration kLeavingPause = std::chrono::milliseconds(50);

  // Bounds the number of connections that a leaving rank opens, because ranks that leave together
  // change the neighbours of all others many times.
  static constexpr int kMaxLeavingDials = 2;

  struct Setup {
    DialPlan plan;
    std::vector<std::unique_ptr<os::Listener>> listeners;
    Duration silence_limit{};
    os::Event& wake_up;
    LogSink& log;
    ControlMeter& meter;
    std::function<void(int peer, std::unique_ptr<os::Socket>)> on_data_connection;
  };
  // A finding about a rank that is neither lost nor left as far as this process knows.
  struct Verdict {
    int rank = -1;
    SignOfLoss sign = SignOfLoss::kUnreachable;
    bool is_of_host =
        false;  // is also true for ranks of its host that have no connection to this rank
  };
  struct Findings {
    std::vector<Dialer::Outcome> connections;  // the outcomes, which are all kConnected
    std::vector<Verdict> verdicts;
  };
  // The state of the plane that the healer depends on.
  struct View {
    std::vector<bool> is_present;            // is_present[r]: rank r is neither lost nor has left
    std::function<bool(int rank)> has_link;  // returns whether there is a connection to the rank
    bool may_dial = true;
  };

  EdgeHealer(os::System& system, Setup setup);

  // Called when the set of ranks that are present has changed.
  void note_loss();
  void note_leave();
  // Called when a connection to this rank has ended before anything was received over it. The rank
  // is reported as unreachable unless its leave arrives, or a connection is made, within
  // kLeaveNewsTime.
  void suspect(int rank);

  // `is_ready` says whether one of the interests is ready.
  Findings advance(const View& view, bool is_ready);
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // Called when this process leaves. Connections that are missing after kLeavingPause are opened
  // while View::may_dial, kMaxLeavingDials at most. Connections of other ranks are still accepted.
  void start_leaving();
  // Returns whether no further connection has to be opened: all neighbours are connected, gone or
  // no longer listening, or kMaxLeavingDials is exhausted. REQUIRES: start_leaving().
  bool is_complete(const View& view) const;
  // Stops accepting and opening connections.
  void stop();

 private:
  void plan_edges(const View& view);
  void dial_missing(const View& view);
  // Returns whether the peer is neither suspected nor dialed at present.
  bool is_open(int peer) const { return !suspects_.contains(peer) && !dialer_.is_dialing(peer); }
  void take_calls(Findings& findings);
  void take_dials(Findings& findings);
  void judge_suspects(const View& view, Findings& findings);

  os::System& system_;
  const Setup setup_;
  const int self_;
  Callers callers_;
  Dialer dialer_;
  std::optional<TimePoint> plan_at_;  // the time at which wanted_ is computed again
  std::vector<int> wanted_;           // the neighbours, to which this rank wants connections
  // The neighbours without a connection; the value is the time since which it is missing.
  std::map<int, TimePoint> missing_;
  // The time at which each suspect is reported as unreachable; the key is the rank.
  std::map<int, TimePoint> suspects_;
  bool is_leaving_ = false;
  int num_leaving_dials_ = 0;
  bool has_stopped_ = false;
};

}  // namespace cadre
