// Sees to it that this process has the connections which the topology asks for: opens those that
// are missing, takes those that others open, and finds out which ranks cannot be reached.
//
// Threads: the control plane's. Blocking: stop(), for a second at most. Lifetime: borrows the
// System, the plan, the event and the log; owns the listeners. Errors: none; verdicts.
// Of a missing connection the end with the higher rank dials at once, the other one after 1 s. Both
// may come to be; they are kept.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/comm/bootstrap/callers.h"
#include "cadre/comm/fabric/control_plane.h"
#include "cadre/comm/fabric/dialer.h"
#include "cadre/os/system.h"

namespace cadre {

class EdgeHealer {
 public:
  // How long the other end of a missing connection has for its call.
  static constexpr Duration kCallTime = std::chrono::seconds(1);
  // How long the news may take that a rank left, which does not listen any more.
  static constexpr Duration kLeaveNewsTime = std::chrono::seconds(1);
  // Several losses mostly come together.
  static constexpr Duration kLossPause = std::chrono::milliseconds(50);
  // Ranks of a job that ends leave together. The graph bears the gap of one meanwhile.
  static constexpr Duration kLeavePause = std::chrono::seconds(1);
  // How long a rank that leaves waits for the news that those left, too, which it would have to
  // connect to.
  static constexpr Duration kLeavingPause = std::chrono::milliseconds(50);

  // Ranks that leave together change the neighbours of all others many times: the number of
  // connections that one of them opens is bounded.
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
  // What was found out about a rank that is neither lost nor left as far as is known here.
  struct Verdict {
    int rank = -1;
    SignOfLoss sign = SignOfLoss::kUnreachable;
    bool is_of_host = false;  // and of all ranks of its host that have no connection to this one
  };
  struct Findings {
    std::vector<Dialer::Outcome> connections;  // all are kConnected
    std::vector<Verdict> verdicts;
  };
  // What the healer has to know of the plane.
  struct View {
    std::vector<bool> is_present;            // by rank: neither lost nor left
    std::function<bool(int rank)> has_link;  // to that rank
    bool may_dial = true;
  };

  EdgeHealer(os::System& system, Setup setup);

  // The set of ranks that are present has changed.
  void note_loss();
  void note_leave();
  // A connection to this rank ended before anything came over it: it is lost unless it turns out
  // soon that it left.
  void suspect(int rank);

  // `is_ready`: one of the interests is.
  Findings advance(const View& view, bool is_ready);
  void add_interests(std::vector<os::PollItem>& items) const;
  Deadline next_deadline(Deadline deadline) const;
  // This process leaves: connections that are missing after kLeavingPause are opened, as long as
  // View::may_dial, kMaxLeavingDials at most. Those of other ranks are accepted.
  void start_leaving();
  // No connection is missing but to ranks that do not listen any more, or all are opened that may
  // be. REQUIRES: start_leaving().
  bool is_complete(const View& view) const;
  // Takes and opens no connection any more.
  void stop();

 private:
  void plan_edges(const View& view);
  void dial_missing(const View& view);
  // Nothing else decides at present what becomes of it.
  bool is_open(int peer) const { return !suspects_.contains(peer) && !dialer_.is_dialing(peer); }
  void take_calls(Findings& findings);
  void take_dials(Findings& findings);
  void judge_suspects(const View& view, Findings& findings);

  os::System& system_;
  const Setup setup_;
  const int self_;
  Callers callers_;
  Dialer dialer_;
  std::optional<TimePoint> plan_at_;   // of the next look at the topology
  std::vector<int> wanted_;            // the neighbours
  std::map<int, TimePoint> missing_;   // those without a connection, and since when
  std::map<int, TimePoint> suspects_;  // and until when they may turn out to have left
  bool is_leaving_ = false;
  int num_leaving_dials_ = 0;
  bool has_stopped_ = false;
};

}  // namespace cadre
