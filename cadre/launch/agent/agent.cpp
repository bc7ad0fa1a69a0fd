#include "cadre/launch/agent/agent.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::launch {
namespace {

constexpr Duration kTick = std::chrono::milliseconds(250);
constexpr Duration kPause = std::chrono::milliseconds(200);

}  // namespace

Agent::Agent(AgentOptions options, uint64_t seed) : options_(std::move(options)), random_(seed) {
  table_.job = options_.job;
}

void Agent::start(TimePoint now) {
  now_ = now;
  idle_since_ = now;
  lease_until_ = now;
  if (options_.endpoint == options_.self.address) {
    take_over();
  } else {
    look("this agent has just started");
  }
  end_event();
}

void Agent::connected(TimePoint now, ConnectionId connection) {
  begin_event(now);
  if (connection == upstream_ && role_ == Role::kLooking) {
    step_until_ = now_ + options_.silence;
    send_join();
  } else if (probes_.contains(connection)) {
    send(connection, table_message());
  }
  end_event();
}

void Agent::connect_failed(TimePoint now, ConnectionId connection, bool is_refused) {
  begin_event(now);
  if (connection == upstream_ && role_ == Role::kLooking) {
    if (is_refused) candidate_has_ended();
    upstream_ = 0;
    candidate_failed();
  } else if (const auto probe = probes_.find(connection); probe != probes_.end()) {
    const AgentId id = probe->second;
    probes_.erase(probe);
    if (is_refused && id != 0) give_up(id, true, "its agent has ended");
  }
  end_event();
}

void Agent::accepted(TimePoint now, ConnectionId /*connection*/) {
  begin_event(now);
  end_event();
}

void Agent::connection_lost(TimePoint now, ConnectionId connection) {
  begin_event(now);
  parked_joins_.erase(connection);
  probes_.erase(connection);
  if (connection == upstream_ && connection != 0) {
    upstream_ = 0;
    if (role_ == Role::kFollowing) {
      look("the connection to the coordinator was lost");
    } else if (role_ == Role::kLooking) {
      candidate_failed();
    }
  } else if (const auto at = follower_of_.find(connection); at != follower_of_.end()) {
    followers_[at->second].connection = 0;
    follower_of_.erase(at);
    next_probe_ = now_;
  }
  end_event();
}

void Agent::received(TimePoint now, ConnectionId connection, const Message& message) {
  begin_event(now);
  const auto sender = follower_of_.find(connection);
  if (role_ == Role::kEnded) {
    // Nothing can change any more.
  } else if (message.kind == MessageKind::kJoin) {
    if (role_ == Role::kCoordinating) {
      join(connection, message);
    } else if (role_ == Role::kFollowing) {
      send(connection, table_message());
    } else {
      parked_joins_[connection] = message;
    }
  } else if (message.kind == MessageKind::kTable) {
    receive_table(connection, message);
  } else if (message.kind == MessageKind::kBeatReply) {
    const bool is_own = role_ == Role::kFollowing && connection == upstream_;
    if (is_own) lease_until_ = std::max(lease_until_, message.time + options_.silence);
  } else if (role_ == Role::kCoordinating && sender != follower_of_.end()) {
    hear(followers_[sender->second], sender->second, message);
  }
  end_event();
}

void Agent::receive_table(ConnectionId connection, const Message& message) {
  const Table& other = *message.table;
  if (other.job != options_.job) return;
  const bool is_from_coordinator = message.host.id == other.coordinator;
  if (connection == upstream_ && role_ == Role::kLooking) {
    if (message.host.id != candidates_[candidate_].id) candidate_has_ended();
    if (is_from_coordinator) {
      follow(connection, message);
    } else if (other.coordinator == options_.self.id) {
      close(upstream_);
      candidate_failed();
    } else {
      look_at(other);
    }
  } else if (connection == upstream_ && role_ == Role::kFollowing) {
    if (!is_from_coordinator || other.epoch < table_.epoch) return;
    table_ = other;
    obey_table();
  } else if (role_ == Role::kCoordinating) {
    receive_other_table(connection, message);
  } else if (role_ == Role::kLooking) {
    if (is_from_coordinator && table_.phase != Phase::kFailed) look_at(other);
  } else {
    send(connection, table_message());
  }
}

void Agent::workers_ended(TimePoint now, Outcome outcome, std::string_view reason) {
  begin_event(now);
  const bool was_stopped = is_stopping_ || is_killed_;
  has_workers_ = is_stopping_ = is_killed_ = false;
  outcome_ = was_stopped ? Outcome::kStopped : outcome;
  outcome_reason_ = reason;
  if (role_ == Role::kCoordinating) {
    const bool is_present = worker_round_ == table_.round && table_.phase == Phase::kRunning;
    if (is_present && is_failure(outcome_)) worker_failed(options_.self.id, outcome_, reason);
  } else if (table_.phase == Phase::kFailed) {
    end(1, table_.reason);
  } else if (role_ == Role::kFollowing) {
    report();
    obey_table();
  }
  end_event();
}

void Agent::set_endpoint(TimePoint now, std::string endpoint) {
  if (endpoint == options_.endpoint || role_ == Role::kEnded) return;
  begin_event(now);
  options_.endpoint = std::move(endpoint);
  const bool is_own = options_.endpoint == options_.self.address;
  const bool has_result = table_.phase == Phase::kDone || table_.phase == Phase::kFailed;
  if (role_ == Role::kLooking && table_.round == 0 && is_own && !is_leaving_ && !has_result) {
    take_over();
  } else if (is_beginning() && !is_own && !options_.endpoint.empty() && !has_result) {
    stop_coordinating();
    forget_job();
    look("another agent is at the endpoint");
  }
  end_event();
}

void Agent::leave(TimePoint now) {
  begin_event(now);
  is_leaving_ = true;
  if (role_ == Role::kCoordinating) {
    const bool has_round = table_.phase == Phase::kStarting || table_.phase == Phase::kRunning;
    if (has_round) drain("the host of the coordinator leaves the job");
  } else if (has_workers_) {
    if (role_ == Role::kFollowing) {
      send(upstream_, {.kind = MessageKind::kLeave, .has_workers = true});
    }
    stop_workers();
  }
  end_event();
}

void Agent::timer(TimePoint now) {
  begin_event(now);
  if (role_ == Role::kLooking && now_ >= step_until_) {
    take_timed_step();
  } else if (role_ == Role::kFollowing && now_ >= next_beat_) {
    next_beat_ = now_ + options_.beat_interval;
    send(upstream_, {.kind = MessageKind::kBeat, .time = now_});
  } else if (role_ == Role::kCoordinating && now_ >= next_probe_) {
    probe();
  }
  end_event();
}

TimePoint Agent::next_timer() const {
  switch (role_) {
    case Role::kLooking:
      return has_workers_ && !is_killed_ ? std::min(step_until_, lease_until_) : step_until_;
    case Role::kFollowing:
      return std::min(next_beat_, lease_until_);
    case Role::kCoordinating:
      return now_ + kTick;
    case Role::kEnded:
      break;
  }
  return TimePoint{INT64_MAX};
}

std::vector<AgentAction> Agent::take_actions() {
  return std::exchange(actions_, {});
}

void Agent::begin_event(TimePoint now) {
  now_ = now;
  const bool is_member = role_ == Role::kFollowing || role_ == Role::kCoordinating;
  if (is_member && is_active(table_)) idle_since_ = now_;
  const bool has_lease = role_ == Role::kFollowing || role_ == Role::kLooking;
  if (has_lease && now_ >= lease_until_) {
    kill_workers();
    if (role_ == Role::kFollowing) look("the coordinator does not answer");
  }
  if (is_killed_ && killed_by_ && now_ >= *killed_by_) kill_workers();
  if (role_ == Role::kCoordinating) check_silence();
}

void Agent::end_event() {
  if (role_ == Role::kCoordinating) check_phase();
  const bool waits = role_ == Role::kCoordinating ? any_workers() : has_workers_;
  if (!is_leaving_ || waits || role_ == Role::kEnded) return;
  // The message proves to the coordinator that this agent ends.
  if (role_ == Role::kFollowing) send(upstream_, {.kind = MessageKind::kLeave});
  end(0, "the host has left the job");
}

void Agent::send(ConnectionId connection, Message message) {
  message.epoch = table_.epoch;
  act({.kind = Kind::kSend, .connection = connection, .message = std::move(message)});
}

void Agent::close(ConnectionId& connection) {
  if (connection != 0) act({.kind = Kind::kClose, .connection = connection});
  connection = 0;
}

Message Agent::table_message() const {
  return {.kind = MessageKind::kTable,
          .host = options_.self,
          .table = std::make_shared<const Table>(table_)};
}

void Agent::end(int exit_code, std::string reason) {
  role_ = Role::kEnded;
  act({.kind = Kind::kEnd, .text = std::move(reason), .exit_code = exit_code});
}

// Looking for a coordinator.

void Agent::look(std::string_view why) {
  role_ = Role::kLooking;
  close(upstream_);
  log(cadre::format("looking for the coordinator of job {}: {}", options_.job, why));
  candidates_.clear();
  candidate_ = 0;
  if (table_.phase == Phase::kFailed) {
    kill_workers();
    if (!has_workers_) return end(1, table_.reason);
    step_until_ = now_ + options_.stop_timeout;
    return;
  }
  if (table_.round > 0) {
    std::vector<Host> line;
    for (const Host& host : table_.hosts) {
      if (host.state == HostState::kIn) line.push_back(host);
    }
    // An agent that was the coordinator itself, and stepped down, has no precedence.
    const AgentId last = table_.coordinator == options_.self.id ? 0 : table_.coordinator;
    std::ranges::stable_sort(line, [&](const Host& a, const Host& b) {
      const bool is_a_first = a.id == last;
      const bool is_b_first = b.id == last;
      return is_a_first != is_b_first ? is_a_first : a.node_rank < b.node_rank;
    });
    for (const Host& host : line) candidates_.push_back({host.id, host.address});
  }
  if (!options_.endpoint.empty()) candidates_.push_back({0, options_.endpoint});
  dial_next();
}

void Agent::look_at(const Table& table) {
  const Host* coordinator = table.find(table.coordinator);
  close(upstream_);
  if (coordinator == nullptr || dead_.contains(coordinator->id)) return candidate_failed();
  candidate_ = std::min(candidate_ + 1, candidates_.size());
  candidates_.insert(candidates_.begin() + static_cast<ptrdiff_t>(candidate_),
                     {coordinator->id, coordinator->address});
  dial_next();
}

// The rounds of this agent's table have not run and never will.
void Agent::forget_job() {
  table_ = {};
  table_.job = options_.job;
}

void Agent::dial_next() {
  for (; candidate_ < candidates_.size(); ++candidate_) {
    const Candidate& candidate = candidates_[candidate_];
    if (candidate.id == options_.self.id && !is_leaving_) return take_over();
    const bool is_self = candidate.address == options_.self.address;
    if (is_self || dead_.contains(candidate.id)) continue;
    upstream_ = next_connection_;
    next_connection_ += 2;
    step_until_ = now_ + options_.connect_timeout;
    act({.kind = Kind::kConnect, .connection = upstream_, .text = candidate.address});
    return;
  }
  upstream_ = 0;
  step_until_ = now_ + kPause + Duration(random_.below(static_cast<uint64_t>(kPause.count())));
}

void Agent::candidate_failed() {
  ++candidate_;
  dial_next();
}

// The agent with which this one wanted to speak is proven to have ended. If it is the coordinator
// and this host's lease is valid, it cannot have voted for a round of which this host does not
// know.
void Agent::candidate_has_ended() {
  const AgentId id = candidates_[candidate_].id;
  if (id == 0) return;
  dead_.insert(id);
  if (id == table_.coordinator && now_ < lease_until_) remove_vote(id);
}

void Agent::take_timed_step() {
  if (now_ >= idle_since_ + options_.join_timeout || table_.phase == Phase::kFailed) {
    kill_workers();
    if (has_workers_) {
      step_until_ = now_ + options_.stop_timeout;
      return;
    }
    if (table_.phase == Phase::kFailed) return end(1, table_.reason);
    return end(1,
               cadre::format(
                   "host {} found no coordinator of job {} for {} s; the last address "
                   "it tried was {}; check that the agent there runs and that no "
                   "firewall is between the hosts",
                   options_.self.name, options_.job,
                   std::chrono::duration_cast<std::chrono::seconds>(options_.join_timeout).count(),
                   candidates_.empty() ? "none, because no registry names one"
                                       : candidates_.back().address));
  }
  if (upstream_ != 0) {
    close(upstream_);
    candidate_failed();
  } else {
    look("no host of the job answers yet");
  }
}

void Agent::send_join() {
  send(upstream_, {.kind = MessageKind::kJoin,
                   .round = worker_round_,
                   .time = now_,
                   .has_workers = has_workers_,
                   .outcome = outcome_,
                   .reason = outcome_reason_,
                   .host = options_.self,
                   .table = std::make_shared<const Table>(table_)});
}

// Following.

void Agent::follow(ConnectionId connection, const Message& message) {
  if (message.table->phase == Phase::kGathering) kill_workers_by(lease_until_);
  role_ = Role::kFollowing;
  upstream_ = connection;
  table_ = *message.table;
  log(cadre::format("joined job {}, whose coordinator is host {} (epoch {})", options_.job,
                    message.host.name, table_.epoch));
  for (auto& [parked, join] : std::exchange(parked_joins_, {})) send(parked, table_message());
  lease_until_ = message.time + options_.silence;
  next_beat_ = now_;
  // The workers may have ended since the join was sent.
  report();
  obey_table();
}

void Agent::obey_table() {
  const bool has_round = table_.phase == Phase::kStarting || table_.phase == Phase::kRunning;
  if (has_round && worker_round_ != table_.round) kill_workers();
  switch (table_.phase) {
    case Phase::kGathering:
      if (!is_killed_) kill_workers();
      break;
    case Phase::kStarting:
      if (has_workers_ || is_leaving_) break;
      send(upstream_, {.kind = MessageKind::kConfirm, .round = table_.round});
      break;
    case Phase::kRunning:
      if (has_workers_ || worker_round_ >= table_.round || is_leaving_) break;
      if (ranks_of(table_, options_.self.id)) start_workers();
      break;
    case Phase::kDraining:
      stop_workers();
      report();
      break;
    case Phase::kDone:
      end(0, "all workers of the job have ended with exit code 0");
      break;
    case Phase::kFailed:
      stop_workers();
      if (!has_workers_) end(1, table_.reason);
      break;
  }
}

void Agent::report() {
  send(upstream_, {.kind = MessageKind::kReport,
                   .round = worker_round_,
                   .has_workers = has_workers_,
                   .outcome = outcome_,
                   .reason = outcome_reason_});
}

void Agent::start_workers() {
  worker_round_ = table_.round;
  has_workers_ = true;
  outcome_ = Outcome::kNone;
  const Host* coordinator = table_.find(table_.coordinator);
  act({.kind = Kind::kStartWorkers,
       .text = coordinator == nullptr ? "" : coordinator->address,
       .round = worker_round_,
       .ranks = *ranks_of(table_, options_.self.id)});
}

void Agent::stop_workers() {
  if (!has_workers_ || is_stopping_ || is_killed_) return;
  is_stopping_ = true;
  act({.kind = Kind::kStopWorkers});
}

void Agent::kill_workers_by(TimePoint by) {
  const bool is_at_once = by <= now_;
  if (!has_workers_ || (is_killed_ && !killed_by_) ||
      (is_killed_ && !is_at_once && by >= *killed_by_)) {
    return;
  }
  is_killed_ = true;
  killed_by_ = is_at_once ? std::nullopt : std::optional(by);
  act({.kind = Kind::kKillWorkers, .by = std::max(by, now_)});
}

}  // namespace cadre::launch
