// One host's part in a job on several hosts, as a state machine without sockets, processes or a
// clock: events go in, actions come out.
//
// Threads: one owner. Blocking: never. The owner calls timer() at next_timer() and performs the
// actions that take_actions() returns, in their order, before the next event. Connections that the
// agent opens have even numbers; the owner gives odd numbers to those that it accepts.
//
// Why at most one round has running workers:
// - An agent kills its workers when its last acknowledged beat was sent `silence` ago. The
//   coordinator gives a host up a `margin` after it heard the host's last beat for `silence`.
// - A round starts only when all its hosts and a majority of the hosts of the last round
//   (Table::quorums) have confirmed it, so two coordinators cannot both start one.
// - A coordinator that has lost the majority has all its workers killed. A new coordinator waits
//   until the old one must have noticed, unless all members of the quorums follow it or are proven
//   to have ended: their hosts refuse connections to them.
// - When hosts meet at a new coordinator, their workers of the old round end by the end of the old
//   lease. The new coordinator starts no round before all its hosts have reported that.
// - The vote of an agent that has ended is removed only while it cannot have voted for a round of
//   another coordinator (remove_vote()).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/random.h"
#include "cadre/launch/agent/message.h"
#include "cadre/launch/agent/table.h"

namespace cadre::launch {

using ConnectionId = uint64_t;

struct AgentOptions {
  std::string job;
  Host self;
  std::string endpoint;  // HOST:PORT of the first coordinator; empty: not known yet
  size_t min_hosts = 1;
  size_t max_hosts = 1;
  uint32_t max_restarts = 0;
  // Whether a job goes on with exactly half of its hosts, while the other half may still run.
  bool continues_with_half = false;
  Duration beat_interval = std::chrono::seconds(1);
  Duration silence = std::chrono::seconds(5);
  Duration margin = std::chrono::seconds(1);
  Duration connect_timeout = std::chrono::seconds(1);
  Duration last_call_timeout = std::chrono::seconds(30);
  Duration join_timeout = std::chrono::seconds(600);
  Duration stop_timeout = std::chrono::seconds(30);  // the longest time that workers take to stop
};

struct AgentAction {
  enum class Kind {
    kConnect,       // open `connection` to `text`, an address
    kSend,          // `message` on `connection`
    kClose,         // `connection`
    kStartWorkers,  // of `round`, with `ranks`; their store is at the agent with address `text`
    kStopWorkers,   // SIGTERM, then SIGKILL
    kKillWorkers,   // SIGKILL at once, except workers that can wait: they have until `by` to come
    kLog,           // `text`
    kEnd,           // the agent, with `exit_code` and the reason in `text`
  };
  Kind kind = Kind::kLog;
  ConnectionId connection = 0;
  std::string text;
  Message message;
  uint64_t round = 0;
  HostRanks ranks;
  TimePoint by;
  int exit_code = 0;
};

class Agent {
 public:
  Agent(AgentOptions options, uint64_t seed);

  void start(TimePoint now);
  void connected(TimePoint now, ConnectionId connection);
  // `is_refused`: the host answered that no process listens at the address.
  void connect_failed(TimePoint now, ConnectionId connection, bool is_refused);
  void accepted(TimePoint now, ConnectionId connection);
  void connection_lost(TimePoint now, ConnectionId connection);
  void received(TimePoint now, ConnectionId connection, const Message& message);
  // All workers of the host have ended: by themselves, or after kStopWorkers or kKillWorkers.
  void workers_ended(TimePoint now, Outcome outcome, std::string_view reason);
  // A registry says that the job's coordinator is at `endpoint`; empty: at no address, or it does
  // not answer. Before the first round the agent at the endpoint coordinates, and no other starts
  // one.
  void set_endpoint(TimePoint now, std::string endpoint);
  // The user or the scheduler asks the host to leave the job.
  void leave(TimePoint now);
  void timer(TimePoint now);

  TimePoint next_timer() const;
  std::vector<AgentAction> take_actions();

  const Table& table() const { return table_; }
  bool is_coordinator() const { return role_ == Role::kCoordinating; }
  bool is_looking() const { return role_ == Role::kLooking; }
  // Returns whether this agent coordinates a job of which no round has run.
  bool is_beginning() const { return is_coordinator() && is_beginning_; }
  bool has_ended() const { return role_ == Role::kEnded; }

 private:
  enum class Role { kLooking, kFollowing, kCoordinating, kEnded };
  using Kind = AgentAction::Kind;
  // What a coordinator knows of another agent.
  struct Follower {
    ConnectionId connection = 0;  // 0: none at present
    TimePoint last_received;
    bool has_workers = false;
    bool has_confirmed = false;
    bool is_leaving = false;
    Outcome outcome = Outcome::kNone;
  };
  struct Candidate {
    AgentId id = 0;  // 0: unknown, the endpoint
    std::string address;
  };

  // Every event begins with it: rights that have expired are given up before anything else.
  void begin_event(TimePoint now);
  void end_event();
  void receive_table(ConnectionId connection, const Message& message);
  Message table_message() const;
  void act(AgentAction action) { actions_.push_back(std::move(action)); }
  void send(ConnectionId connection, Message message);
  void close(ConnectionId& connection);
  void log(std::string text) { act({.kind = Kind::kLog, .text = std::move(text)}); }
  void end(int exit_code, std::string reason);

  // Looking for a coordinator.
  void look(std::string_view why);
  void look_at(const Table& table);
  void forget_job();
  void take_timed_step();
  void dial_next();
  void candidate_failed();
  void candidate_has_ended();
  void send_join();

  // Following.
  void follow(ConnectionId connection, const Message& message);
  void obey_table();
  void report();
  // Has the workers killed at once, or those that can wait for a new membership at `by`, which is
  // not later than the end of the lease under which they run. A later call can only shorten that
  // time.
  void kill_workers() { kill_workers_by(now_); }
  void kill_workers_by(TimePoint by);
  void stop_workers();
  void start_workers();

  // Coordinating.
  void take_over();
  void step_down(const Table& other);
  void stop_coordinating();
  bool may_begin() const { return !is_beginning_ || options_.endpoint == options_.self.address; }
  bool outranks(const Table& other) const;
  void receive_other_table(ConnectionId connection, const Message& message);
  void join(ConnectionId connection, const Message& message);
  void adopt(const Table& other);
  void hear(Follower& follower, AgentId id, const Message& message);
  void give_up(AgentId id, bool is_dead, std::string_view why);
  void forget_dead_hosts();
  void remove_vote(AgentId id);
  void worker_failed(AgentId id, Outcome outcome, std::string_view reason);
  void drain(std::string_view why);
  void fence();
  void gather();
  bool has_quorum(bool (Agent::*has_vote)(AgentId) const) const;
  bool is_present(AgentId id) const;
  bool has_confirmed(AgentId id) const;
  bool is_followed_by(AgentId id) const;
  bool has_to_wait() const;
  bool any_workers() const;
  // Says in the log how many hosts are here, if the number has changed.
  void announce(size_t num_present);
  std::string missing_text(size_t num_present) const;
  void check_gathering();
  void check_starting();
  void check_running();
  void check_end();
  void propose(size_t num_hosts);
  void fail_job(std::string reason);
  void broadcast();
  void probe();
  void check_silence();
  void check_phase();

  AgentOptions options_;
  Random random_;
  TimePoint now_;
  Role role_ = Role::kLooking;
  Table table_;
  std::vector<AgentAction> actions_;
  ConnectionId next_connection_ = 2;
  bool is_leaving_ = false;

  // This host's workers.
  uint64_t worker_round_ = 0;
  bool has_workers_ = false;
  bool is_stopping_ = false;
  bool is_killed_ = false;
  // The time by which they are killed, if is_killed_; nullopt: at once.
  std::optional<TimePoint> killed_by_;
  Outcome outcome_ = Outcome::kNone;
  std::string outcome_reason_;

  // Looking and following.
  std::vector<Candidate> candidates_;
  size_t candidate_ = 0;
  ConnectionId upstream_ = 0;  // the connection to the candidate or coordinator
  TimePoint step_until_;       // the candidate has to answer; or the pause before the next one
  TimePoint idle_since_;       // the agent has not been part of a job with a round since then
  TimePoint lease_until_;
  TimePoint next_beat_;
  std::set<AgentId> dead_;
  std::map<ConnectionId, Message>
      parked_joins_;  // joins of agents that take this one for the coordinator

  // Coordinating.
  std::map<AgentId, Follower> followers_;
  std::map<ConnectionId, AgentId> follower_of_;
  std::map<ConnectionId, AgentId> probes_;  // 0: the endpoint
  bool is_beginning_ = false;
  TimePoint next_probe_;
  TimePoint hold_until_;  // workers of another coordinator may still run
  TimePoint news_at_;
  size_t num_announced_ = 0;  // how many hosts are here by the last line of the log
  std::optional<TimePoint> regroup_at_;
  TimePoint end_by_;
};

}  // namespace cadre::launch
