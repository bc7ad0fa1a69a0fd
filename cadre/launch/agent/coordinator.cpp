// The methods of Agent that have an effect while it is the coordinator.
#include <algorithm>
#include <tuple>

#include "cadre/core/base/format.h"
#include "cadre/launch/agent/agent.h"

namespace cadre::launch {
namespace {

int64_t num_seconds(Duration duration) {
  return std::chrono::duration_cast<std::chrono::seconds>(duration).count();
}

}  // namespace

void Agent::take_over() {
  kill_workers_by(lease_until_);
  close(upstream_);
  role_ = Role::kCoordinating;
  is_beginning_ = table_.round == 0;
  ++table_.epoch;
  table_.coordinator = options_.self.id;
  table_.phase = Phase::kGathering;
  table_.reason.clear();
  if (table_.find(options_.self.id) == nullptr) table_.hosts.push_back(options_.self);
  std::erase_if(table_.hosts, [&](const Host& host) {
    return host.state == HostState::kSpare && host.id != options_.self.id;
  });
  for (Host& host : table_.hosts) {
    if (host.id != options_.self.id) host.state = HostState::kLost;
  }
  followers_.clear();
  follower_of_.clear();
  regroup_at_.reset();
  hold_until_ = now_ + 2 * (options_.silence + options_.margin);
  // The first round cannot start without the first coordinator.
  if (table_.round == 0) table_.quorums = {{options_.self.id}};
  forget_dead_hosts();
  news_at_ = next_probe_ = now_;
  num_announced_ = 0;
  log(cadre::format("this host is the coordinator of job {} (epoch {})", options_.job,
                    table_.epoch));
  for (auto& [connection, message] : std::exchange(parked_joins_, {})) join(connection, message);
}

// The coordinator that knows the later round keeps the job, then the one that has it active, then
// the one of the later epoch. A job that has failed for one part of the hosts is left to it.
bool Agent::outranks(const Table& other) const {
  const auto rank_of = [](const Table& table) {
    const bool has_round = is_active(table) || table.phase == Phase::kDone;
    return std::tuple(table.phase != Phase::kFailed, table.round, has_round, table.epoch,
                      table.coordinator);
  };
  const bool is_own = other.coordinator == options_.self.id;  // an earlier table, from a follower
  const bool has_result = table_.phase == Phase::kDone || table_.phase == Phase::kFailed;
  return is_own || has_result || rank_of(table_) > rank_of(other);
}

// An agent that is not the follower of this coordinator has sent its table.
void Agent::receive_other_table(ConnectionId connection, const Message& message) {
  const auto probe = probes_.find(connection);
  const AgentId probed = probe == probes_.end() ? 0 : probe->second;
  if (probed != 0 && probed != message.host.id) {
    give_up(probed, true, "another agent runs at its address");
  }
  if (!outranks(*message.table)) {
    step_down(*message.table);
  } else if (probe == probes_.end()) {
    send(connection, table_message());
  } else {
    probes_.erase(probe);
    act({.kind = Kind::kClose, .connection = connection});
  }
}

void Agent::step_down(const Table& other) {
  stop_coordinating();
  log(cadre::format("another host stays the coordinator (epoch {}); this one follows it",
                    other.epoch));
  candidates_ = {{0, options_.endpoint}};
  candidate_ = 0;
  look_at(other);
}

void Agent::stop_coordinating() {
  kill_workers();
  for (const auto& [connection, id] : follower_of_) {
    act({.kind = Kind::kClose, .connection = connection});
  }
  for (const auto& [connection, id] : probes_) {
    act({.kind = Kind::kClose, .connection = connection});
  }
  follower_of_.clear();
  followers_.clear();
  probes_.clear();
  role_ = Role::kLooking;
}

void Agent::join(ConnectionId connection, const Message& message) {
  const AgentId id = message.host.id;
  const bool knows_job = message.table != nullptr && message.table->round > 0;
  if (message.table != nullptr && message.table->job != options_.job) {
    log(cadre::format("refused host {}: it belongs to job {}, not to {}", message.host.name,
                      message.table->job, options_.job));
    act({.kind = Kind::kClose, .connection = connection});
    return;
  }
  if (knows_job) adopt(*message.table);
  std::vector<AgentId> replaced;
  for (const Host& host : table_.hosts) {
    if (host.address == message.host.address && host.id != id) replaced.push_back(host.id);
  }
  for (const AgentId other : replaced) give_up(other, true, "another agent runs at its address");
  Follower& follower = followers_[id];
  if (follower.connection != 0) {
    act({.kind = Kind::kClose, .connection = follower.connection});
    follower_of_.erase(follower.connection);
  }
  follower.connection = connection;
  follower.last_received = now_;
  follower.has_workers = message.has_workers;
  follower.has_confirmed = false;
  follower.outcome = message.round == table_.round ? message.outcome : Outcome::kNone;
  follower_of_[connection] = id;
  dead_.erase(id);
  Host* host = table_.find(id);
  if (host == nullptr) {
    table_.hosts.push_back(message.host);
    host = &table_.hosts.back();
    host->state = HostState::kSpare;
    host->node_rank.reset();
    news_at_ = now_;
  } else if (host->state == HostState::kLost) {
    host->state = HostState::kIn;
    news_at_ = now_;
  }
  const bool is_in = host->state == HostState::kIn;
  const bool is_running = table_.phase == Phase::kRunning;
  if (is_running && is_in && message.round < table_.round) follower.has_workers = true;
  if (is_running && !is_in && table_.num_in(HostState::kIn) < options_.max_hosts) {
    regroup_at_ = now_ + options_.beat_interval;
  }
  ++table_.version;
  Message answer = table_message();
  answer.time = message.time;
  send(connection, std::move(answer));
  if (is_running && is_in && is_failure(follower.outcome)) {
    worker_failed(id, follower.outcome, message.reason);
  } else if (is_running && is_in && follower.outcome == Outcome::kStopped) {
    drain(cadre::format("host {} had to kill its workers", message.host.name));
  }
}

// Takes over what an agent knows of the job. An agent that followed another coordinator may know a
// later round; in any case that coordinator may still have workers.
void Agent::adopt(const Table& other) {
  const bool is_foreign = other.coordinator != options_.self.id;
  const bool is_gathering = table_.phase == Phase::kGathering;
  if (is_foreign) hold_until_ = now_ + 2 * (options_.silence + options_.margin);
  if (other.epoch > table_.epoch) table_.epoch = other.epoch + 1;
  table_.restarts_used = std::max(table_.restarts_used, other.restarts_used);
  if (other.round <= table_.round) {
    // Two coordinators can have proposed rounds of the same number.
    for (const auto& quorum : other.quorums) {
      const bool is_known = std::ranges::find(table_.quorums, quorum) != table_.quorums.end();
      const bool is_open = is_foreign && is_gathering && other.round == table_.round;
      if (is_open && !is_known) table_.quorums.push_back(quorum);
    }
    return;
  }
  if (!is_gathering) fence();
  is_beginning_ = false;
  table_.round = other.round;
  table_.quorums = other.quorums;
  std::vector<Host> hosts = other.hosts;
  for (Host& host : hosts) {
    const bool is_here = host.id == options_.self.id || followers_.contains(host.id);
    if (host.state == HostState::kIn && !is_here) host.state = HostState::kLost;
  }
  std::erase_if(hosts, [&](const Host& host) {
    return host.state == HostState::kSpare && table_.find(host.id) == nullptr;
  });
  for (Host host : table_.hosts) {
    if (std::ranges::find(hosts, host.id, &Host::id) != hosts.end()) continue;
    if (host.state == HostState::kLost) continue;
    host.state = HostState::kSpare;
    host.node_rank.reset();
    hosts.push_back(host);
  }
  table_.hosts = std::move(hosts);
  forget_dead_hosts();
}

void Agent::hear(Follower& follower, AgentId id, const Message& message) {
  follower.last_received = now_;
  const bool is_present = message.round == table_.round;
  const bool is_running = table_.phase == Phase::kRunning;
  const Host* host = table_.find(id);
  const bool is_in = host != nullptr && host->state == HostState::kIn;
  switch (message.kind) {
    case MessageKind::kBeat:
      send(follower.connection, {.kind = MessageKind::kBeatReply, .time = message.time});
      break;
    case MessageKind::kConfirm:
      if (is_present && message.epoch == table_.epoch) follower.has_confirmed = true;
      break;
    case MessageKind::kLeave:
      if (!message.has_workers) return give_up(id, true, "it leaves the job");
      follower.is_leaving = true;
      if (is_in && (is_running || table_.phase == Phase::kStarting)) drain("a host leaves the job");
      break;
    case MessageKind::kReport:
      if (is_running && !is_present) break;
      follower.has_workers = message.has_workers;
      if (!is_present) break;
      follower.outcome = message.outcome;
      if (is_running && is_failure(message.outcome)) {
        worker_failed(id, message.outcome, message.reason);
      }
      if (is_running && message.outcome == Outcome::kStopped && !follower.is_leaving) {
        drain(cadre::format("host {} had to kill its workers", host == nullptr ? "?" : host->name));
      }
      break;
    default:
      break;
  }
}

void Agent::check_silence() {
  const Duration limit = options_.silence + options_.margin;
  std::vector<AgentId> silent;
  for (const auto& [id, follower] : followers_) {
    if (now_ >= follower.last_received + limit) silent.push_back(id);
  }
  for (const AgentId id : silent) give_up(id, false, "it was silent for too long");
}

void Agent::give_up(AgentId id, bool is_dead, std::string_view why) {
  const Host* host = table_.find(id);
  const bool is_in = host != nullptr && host->state == HostState::kIn;
  if (host != nullptr) log(cadre::format("lost host {}: {}", host->name, why));
  if (const auto at = followers_.find(id); at != followers_.end()) {
    // It has not been away for long enough to have voted for a round of another coordinator.
    if (is_dead) remove_vote(id);
    if (at->second.connection != 0) {
      act({.kind = Kind::kClose, .connection = at->second.connection});
      follower_of_.erase(at->second.connection);
    }
    followers_.erase(at);
  }
  if (Host* lost = table_.find(id)) {
    if (lost->state == HostState::kSpare) {
      std::erase_if(table_.hosts, [&](const Host& other) { return other.id == id; });
    } else {
      lost->state = HostState::kLost;
    }
  }
  if (is_dead) {
    dead_.insert(id);
    forget_dead_hosts();
  }
  news_at_ = now_;
  const bool has_round = table_.phase == Phase::kStarting || table_.phase == Phase::kRunning;
  if (is_in && has_round) drain("a host was lost");
  // Survivors of the round that ends learn of each host that it has lost.
  if (is_in && table_.phase == Phase::kDraining) broadcast();
}

void Agent::forget_dead_hosts() {
  std::erase_if(table_.hosts, [&](const Host& host) { return dead_.contains(host.id); });
}

void Agent::remove_vote(AgentId id) {
  for (auto& quorum : table_.quorums) std::erase(quorum, id);
}

void Agent::worker_failed(AgentId id, Outcome outcome, std::string_view reason) {
  const Host* host = table_.find(id);
  const std::string text =
      cadre::format("a worker of host {} failed in round {}: {}",
                    host == nullptr ? "unknown" : host->name, table_.round, reason);
  if (outcome == Outcome::kFailedForGood) return fail_job(text);
  if (table_.restarts_used >= options_.max_restarts) {
    return fail_job(cadre::format("{}; {} of {} restarts were used", text, table_.restarts_used,
                                  options_.max_restarts));
  }
  ++table_.restarts_used;
  drain(text);
}

void Agent::drain(std::string_view why) {
  if (table_.phase == Phase::kStarting) table_.quorums.pop_back();  // it has not run
  log(cadre::format("round {} ends: {}", table_.round, why));
  table_.phase = Phase::kDraining;
  regroup_at_.reset();
  stop_workers();
  broadcast();
}

// Has all workers killed at once, because another coordinator may start a round.
void Agent::fence() {
  if (table_.phase == Phase::kStarting) table_.quorums.pop_back();
  kill_workers();
  gather();
}

void Agent::gather() {
  table_.phase = Phase::kGathering;
  regroup_at_.reset();
  news_at_ = now_;
  num_announced_ = 0;
  broadcast();
}

bool Agent::is_present(AgentId id) const {
  if (id == options_.self.id) return !is_leaving_;
  const auto at = followers_.find(id);
  return at != followers_.end() && at->second.connection != 0 && !at->second.is_leaving;
}

bool Agent::has_confirmed(AgentId id) const {
  if (id == options_.self.id) return true;
  const auto at = followers_.find(id);
  return at != followers_.end() && at->second.has_confirmed;
}

bool Agent::is_followed_by(AgentId id) const {
  return id == options_.self.id || followers_.contains(id);
}

// Returns whether `has_vote` holds for a majority of each quorum. If one member is proven to have
// ended, the members outside of a half are less than a half and cannot act, so the half suffices.
bool Agent::has_quorum(bool (Agent::*has_vote)(AgentId) const) const {
  return std::ranges::all_of(table_.quorums, [&](const std::vector<AgentId>& quorum) {
    const auto num_votes = static_cast<size_t>(
        std::ranges::count_if(quorum, [&](AgentId id) { return (this->*has_vote)(id); }));
    const bool half_suffices =
        options_.continues_with_half || quorum.empty() ||
        std::ranges::any_of(quorum, [&](AgentId id) { return dead_.contains(id); });
    return 2 * num_votes > quorum.size() || (2 * num_votes == quorum.size() && half_suffices);
  });
}

// Returns whether hosts of the last rounds may still follow another coordinator, or their lease.
bool Agent::has_to_wait() const {
  const bool is_any_undecided = std::ranges::any_of(
      followers_, [](const auto& follower) { return follower.second.connection == 0; });
  if (is_any_undecided) return true;
  return now_ < hold_until_ && !std::ranges::all_of(table_.quorums, [&](const auto& quorum) {
           return std::ranges::all_of(
               quorum, [&](AgentId id) { return is_followed_by(id) || dead_.contains(id); });
         });
}

bool Agent::any_workers() const {
  return has_workers_ || std::ranges::any_of(followers_, [](const auto& follower) {
           return follower.second.has_workers;
         });
}

std::string Agent::missing_text(size_t num_present) const {
  if (!may_begin()) {
    return cadre::format(
        "the registry of the job has not confirmed for {} s that this host coordinates the job, "
        "and without that its first round does not start; check the service that --rdzv-endpoint "
        "names",
        num_seconds(options_.join_timeout));
  }
  if (has_quorum(&Agent::is_present)) {
    return cadre::format(
        "only {} of at least {} hosts came within {} s; start the others, or give "
        "more time with --rdzv-conf join_timeout=SECONDS",
        num_present, options_.min_hosts, num_seconds(options_.join_timeout));
  }
  return cadre::format(
      "{} {} here, which is no majority of the hosts of the last round, and "
      "the others may still run; they did not come back within {} s. If a job "
      "shall go on with exactly half of its hosts, use --rdzv-conf on_half=continue",
      num_present, num_present == 1 ? "host is" : "hosts are", num_seconds(options_.join_timeout));
}

void Agent::announce(size_t num_present) {
  if (num_announced_ == num_present) return;
  num_announced_ = num_present;
  const std::string range = options_.min_hosts == options_.max_hosts
                                ? cadre::format("{}", options_.max_hosts)
                                : cadre::format("{} to {}", options_.min_hosts, options_.max_hosts);
  log(cadre::format("{} of {} hosts {} here", num_present, range, num_present == 1 ? "is" : "are"));
}

void Agent::check_gathering() {
  const auto num_present = static_cast<size_t>(
      std::ranges::count_if(table_.hosts, [&](const Host& host) { return is_present(host.id); }));
  announce(num_present);
  const bool may_start = may_begin() && !any_workers() && !has_to_wait() && !is_leaving_ &&
                         table_.quorums.size() < Table::kMaxQuorums &&
                         num_present >= options_.min_hosts && has_quorum(&Agent::is_present);
  // All hosts of the last round are still here if the round ended by a worker's failure.
  const bool is_same = table_.round > 0 && !table_.quorums.empty() &&
                       table_.num_in(HostState::kLost) == 0 &&
                       std::ranges::all_of(table_.hosts, [&](const Host& host) {
                         return host.state != HostState::kIn || is_present(host.id);
                       });
  const bool is_full =
      num_present >= options_.max_hosts || (is_same && table_.quorums.back().size() <= num_present);
  // An endpoint that was started again does not know of its predecessor's hosts. They join within
  // their lease.
  const Duration last_call = table_.round == 0
                                 ? std::max(options_.last_call_timeout, options_.silence)
                                 : options_.last_call_timeout;
  if (may_start && (is_full || now_ >= news_at_ + last_call)) {
    propose(std::min(num_present, options_.max_hosts));
  } else if (now_ >= idle_since_ + options_.join_timeout) {
    fail_job(missing_text(num_present));
  }
}

void Agent::propose(size_t num_hosts) {
  for (Host& host : table_.hosts) {
    if (!is_present(host.id)) host.state = HostState::kLost;
  }
  if (auto wrong = wrong_wanted_rank(table_, num_hosts)) return fail_job(*std::move(wrong));
  assign_places(table_, num_hosts);
  if (table_.round == 0) table_.first_coordinator = options_.self.id;
  ++table_.round;
  table_.phase = Phase::kStarting;
  // The coordinator has a vote without a place too: it has to know of every later round.
  std::vector<AgentId> quorum;
  for (const Host& host : table_.hosts) {
    const bool has_vote = host.state == HostState::kIn || host.id == options_.self.id;
    if (has_vote) quorum.push_back(host.id);
  }
  table_.quorums.push_back(std::move(quorum));
  for (auto& [id, follower] : followers_) {
    follower.has_confirmed = false;
    follower.outcome = Outcome::kNone;
  }
  size_t num_workers = 0;
  for (const Host& host : table_.hosts) {
    if (host.state == HostState::kIn) num_workers += host.num_slots;
  }
  log(cadre::format("round {} starts: {} host{}, {} worker{}", table_.round, num_hosts,
                    num_hosts == 1 ? "" : "s", num_workers, num_workers == 1 ? "" : "s"));
  broadcast();
}

void Agent::check_starting() {
  const bool is_confirmed = std::ranges::all_of(table_.hosts, [&](const Host& host) {
    return host.state != HostState::kIn || has_confirmed(host.id);
  });
  if (!is_confirmed || !has_quorum(&Agent::has_confirmed) || !may_begin()) return;
  is_beginning_ = false;
  table_.phase = Phase::kRunning;
  table_.quorums = {table_.quorums.back()};
  for (const Host& host : table_.hosts) {
    const bool is_other = host.state == HostState::kIn && host.id != options_.self.id;
    if (is_other) followers_[host.id].has_workers = true;
  }
  broadcast();
  if (ranks_of(table_, options_.self.id)) start_workers();
}

void Agent::check_running() {
  const bool has_succeeded = std::ranges::all_of(table_.hosts, [&](const Host& host) {
    if (host.state != HostState::kIn) return true;
    const auto at = followers_.find(host.id);
    const Outcome outcome = host.id == options_.self.id ? outcome_
                            : at == followers_.end()    ? Outcome::kNone
                                                        : at->second.outcome;
    return outcome == Outcome::kSucceeded;
  });
  if (has_succeeded) {
    table_.phase = Phase::kDone;
    end_by_ = now_ + options_.silence;
    broadcast();
  } else if (regroup_at_ && now_ >= *regroup_at_) {
    drain("hosts have joined");
  }
}

void Agent::check_end() {
  if (has_workers_) return;
  const bool is_heard = std::ranges::all_of(
      followers_, [](const auto& follower) { return follower.second.connection == 0; });
  if (!is_heard && now_ < end_by_) return;
  if (table_.phase == Phase::kDone) {
    end(0, "all workers of the job have ended with exit code 0");
  } else {
    end(1, table_.reason);
  }
}

void Agent::check_phase() {
  if (is_active(table_) && !has_quorum(&Agent::is_followed_by)) fence();
  switch (table_.phase) {
    case Phase::kGathering:
      return check_gathering();
    case Phase::kStarting:
      return check_starting();
    case Phase::kRunning:
      return check_running();
    case Phase::kDraining:
      if (!any_workers()) gather();
      return;
    case Phase::kDone:
    case Phase::kFailed:
      return check_end();
  }
}

void Agent::fail_job(std::string reason) {
  reason.resize(std::min(reason.size(), Table::kMaxTextBytes));
  table_.phase = Phase::kFailed;
  table_.reason = std::move(reason);
  end_by_ = now_ + options_.stop_timeout + options_.silence;
  stop_workers();
  broadcast();
}

void Agent::broadcast() {
  ++table_.version;
  const Message message = table_message();
  for (const auto& [connection, id] : follower_of_) send(connection, message);
}

// Dials the hosts that are missing, and the endpoint, where newcomers and an agent that was started
// again are. A refusal proves that an agent has ended; an agent that answers learns of this job.
void Agent::probe() {
  next_probe_ = now_ + options_.beat_interval;
  for (const auto& [connection, id] : probes_) {
    act({.kind = Kind::kClose, .connection = connection});
  }
  probes_.clear();
  const auto dial = [&](AgentId id, const std::string& address) {
    probes_[next_connection_] = id;
    act({.kind = Kind::kConnect, .connection = next_connection_, .text = address});
    next_connection_ += 2;
  };
  bool has_endpoint = options_.endpoint.empty() || options_.endpoint == options_.self.address;
  for (const Host& host : table_.hosts) {
    if (host.address == options_.endpoint) has_endpoint = true;
    const auto at = followers_.find(host.id);
    const bool is_connected = at != followers_.end() && at->second.connection != 0;
    if (host.id != options_.self.id && !is_connected) dial(host.id, host.address);
  }
  if (!has_endpoint && table_.round > 0) dial(0, options_.endpoint);
}

}  // namespace cadre::launch
