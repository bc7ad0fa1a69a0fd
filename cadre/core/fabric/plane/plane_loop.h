// The thread of a control plane. It reads all connections, decides whether an ended or silent
// connection means that a rank is lost, and forwards new events.
//
// Threads: run() is the body of one thread, and only that thread uses the other members; the
// constructor and the destructor run before and after it. Blocking: run(), until this process has
// left the fabric. Lifetime: borrows the System, the state, the event, the meter, the layout and
// the identity. Errors: none; an error of a connection closes it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/fabric/plane/control_link.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/fabric/plane/edge_healer.h"
#include "cadre/core/fabric/plane/plane_state.h"
#include "cadre/core/wire/control.h"

namespace cadre {

// Remembers over which connection a status question arrived first, so that the answers are sent
// back over that connection. The last 8 questions of each asking rank are remembered; a rank has
// fewer open questions at a time.
class StatusRoutes {
 public:
  static constexpr size_t kPerOrigin = 8;

  // Returns false if the question was received before, or is older than the remembered questions.
  bool add(const wire::StatusQuestion& question, uint64_t link) {
    Route& route = routes_[question.origin][question.number % kPerOrigin];
    if (question.number <= route.number) return false;
    route = {question.number, link};
    return true;
  }

  // Returns the connection over which the answered question came; nullopt if it is not remembered.
  std::optional<uint64_t> way_back(const wire::StatusAnswer& answer) const {
    const auto found = routes_.find(answer.origin);
    if (found == routes_.end()) return std::nullopt;
    const Route& route = found->second[answer.number % kPerOrigin];
    if (route.number != answer.number) return std::nullopt;
    return route.link;
  }

 private:
  struct Route {
    uint64_t number = 0;  // the number of a question; the first has number 1
    uint64_t link = 0;
  };
  // The routes of questions; the key is the rank that asked.
  std::map<int, std::array<Route, kPerOrigin>> routes_;
};

class PlaneLoop {
 public:
  // The time that this rank waits, after a process has ended, for the last bytes of its connection.
  static constexpr Duration kLastWordsTime = std::chrono::milliseconds(100);
  static constexpr Duration kFlushTime = std::chrono::seconds(1);
  // A leaving rank sends its leave event over direct connections to at least this many present
  // peers.
  static constexpr size_t kMinLeavePeers = 2;
  // The time for which a failure counts as recent: some ranks may not have received it yet.
  static constexpr Duration kFailureNewsTime = std::chrono::seconds(2);

  struct PlaneContext {
    os::System& system;
    DialPlan plan;
    PlaneState& state;
    os::Event& wake_up;
    ControlMeter& meter;
  };
  PlaneLoop(PlaneContext context, ControlPlane::Setup setup);

  void run();

 private:
  // The connections over which an event is forwarded.
  enum class Scope { kEverywhere, kOwnHost, kOtherHosts };
  struct End {
    uint64_t link = 0;
    SignOfLoss sign{};
    bool is_own = false;  // the program closed the descriptor, so the peer is not lost
  };

  void add_link(int peer, std::unique_ptr<os::Socket> socket, bool is_healed);
  ControlLink* find_link(uint64_t id);
  bool has_link(int peer) const;
  bool is_near(int rank) const;

  void obey_orders();
  void start_leaving(Deadline receipts_by);
  bool has_left();
  bool has_news_of_failure() const;
  bool has_few_peers(const std::vector<bool>& is_present) const;
  EdgeHealer::View healer_view() const;
  Deadline next_look(TimePoint now) const;

  void look(std::vector<os::PollItem>& items);
  void receive_from(ControlLink& link);
  void handle(ControlLink& link, const wire::ControlMessage& message);
  void handle_event(ControlLink& link, const wire::Event& event);
  void handle_question(ControlLink& link, const wire::StatusQuestion& question);
  void handle_answer(const wire::StatusAnswer& answer);
  // Records and forwards an event. `by` is the connection over which it arrived; null for an event
  // of this process.
  void learn(const wire::Event& event, const ControlLink* by);
  void spread(const wire::Event& event, Scope scope, uint64_t except_link);
  Scope scope_of(const ControlLink* by) const;

  void judge_ends();
  void bury_ended(TimePoint now);
  void judge_silence(TimePoint now);
  void report_loss(int rank, SignOfLoss sign);
  void report_closed_here();
  void heal(bool is_ready);
  // Returns whether this rank has to wake up in each kStatusInterval.
  bool is_periodic() const;
  // Sends heartbeats and asks the launcher, once in each kStatusInterval.
  void work_periodically(TimePoint now);
  void ask_launcher();

  const PlaneContext context_;
  ControlPlane::Setup setup_;
  const Layout& layout_;
  const int self_;
  EdgeHealer healer_;
  // The elements are unique_ptrs, so that the addresses of the links stay valid when the vector
  // grows.
  std::vector<std::unique_ptr<ControlLink>> links_;
  uint64_t num_links_ = 0;
  std::vector<End> ends_;  // the connections that have ended in this iteration of run()
  std::map<int, TimePoint> ended_processes_;
  StatusRoutes routes_;
  TimePoint periodic_at_;  // the last time of work_periodically()
  TimePoint silence_judged_at_;
  // The time at which this process last learned of a failed group or a lost rank.
  std::optional<TimePoint> failure_heard_at_;
  // The deadline by which the peers must have acknowledged that this process leaves; nullopt if it
  // is not leaving.
  std::optional<Deadline> receipts_by_;
  std::optional<TimePoint> flush_by_;
};

}  // namespace cadre
