// Maintains the control connections that the topology requires: opens those that are missing,
// accepts those that peers open, and reports ranks that cannot be reached.
//
// Threads: only the control plane's thread. Blocking: stop(), at most 1 s. Lifetime: borrows the
// System, the plan, the event and the log; owns the listeners. Errors: none; advance() returns a
// Verdict for each rank that seems lost.
// If a connection between two ranks is missing, the higher rank dials at once, and the lower rank
// after 1 s. If both succeed, both connections are kept.
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
  // The time that the lower rank of a pair waits for the higher one to open the connection.
  static constexpr Duration kCallTime = std::chrono::seconds(1);
  // The time that this rank waits for the leave event of a rank that no longer listens, before it
  // reports that rank as lost.
  static constexpr Duration kLeaveNewsTime = std::chrono::seconds(1);
  // The pause between a loss and the opening of new connections, since losses often occur together.
  static constexpr Duration kLossPause = std::chrono::milliseconds(50);
  // The pause between a leave and the opening of new connections, since the ranks of a job that
  // ends leave together. The topology stays connected without one rank during the pause.
  static constexpr Duration kLeavePause = std::chrono::seconds(1);
  // The time that a leaving rank waits before it connects to new neighbours, since these may be
  // leaving, too, and their leave events may arrive during that time.
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
  // A rank that seems lost, and the sign of its loss. No event has reported the rank as lost or
  // left yet.
  struct Verdict {
    int rank = -1;
    SignOfLoss sign = SignOfLoss::kUnreachable;
    // If true, all ranks of that rank's host that have no connection to this rank seem lost, too.
    bool is_of_host = false;
  };
  struct Findings {
    // The new connections; the outcome of each is kConnected.
    std::vector<Dialer::Outcome> connections;
    std::vector<Verdict> verdicts;
  };
  // The state of the plane that the healer depends on.
  struct View {
    std::vector<bool> is_present;            // is_present[r]: rank r is neither lost nor has left
    std::function<bool(int rank)> has_link;  // returns whether there is a connection to the rank
    bool may_dial = true;
  };

  EdgeHealer(os::System& system, Setup setup);

  // Called when a rank was lost, or has left, so that the neighbours are computed again.
  void note_loss();
  void note_leave();
  // Called when a connection to this rank has ended before anything was received over it. The rank
  // is reported as unreachable unless its leave event arrives, or a new connection to it is made,
  // within kLeaveNewsTime.
  void suspect(int rank);

  // Accepts and opens connections without blocking. `is_ready` says whether an item of
  // add_interests() is ready.
  Findings advance(const View& view, bool is_ready);
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // Called when this process leaves. While View::may_dial is true, missing connections are still
  // opened after kLeavingPause, at most kMaxLeavingDials of them. Connections of other ranks are
  // still accepted.
  void start_leaving();
  // Returns whether a leaving rank has no more connections to open: each neighbour is connected,
  // lost, has left or no longer listens, or kMaxLeavingDials is exhausted. REQUIRES:
  // start_leaving().
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
  // The time at which wanted_ is computed again; nullopt if no rank was lost or left since.
  std::optional<TimePoint> plan_at_;
  // The neighbours in the topology, with which this rank needs a connection.
  std::vector<int> wanted_;
  // The neighbours without a connection; the value is the time at which it was first missing.
  std::map<int, TimePoint> missing_;
  // The time at which each suspect is reported as unreachable; the key is the rank.
  std::map<int, TimePoint> suspects_;
  bool is_leaving_ = false;
  int num_leaving_dials_ = 0;
  bool has_stopped_ = false;
};

}  // namespace cadre
