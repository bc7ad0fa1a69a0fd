// Drives one agent event by event, for the rules that need a certain order of events or an exact
// time. Networks of agents: agent_simulator_test.cpp.
#include "cadre/launch/agent/agent.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"

namespace cadre::launch {
namespace {

using Kind = AgentAction::Kind;
using Quorums = std::vector<std::vector<AgentId>>;

constexpr ConnectionId kUpstream = 2;  // the first connection that an agent opens

TimePoint at(int64_t ms) {
  return TimePoint{ms * 1'000'000};
}

Host host_of(AgentId id) {
  return {.id = id,
          .name = cadre::format("host{}", id),
          .address = cadre::format("host{}:1", id),
          .role = "worker"};
}

// Options with a silence of 5 s and a margin of 1 s. The endpoint is at host 1.
AgentOptions options_of(AgentId id, size_t min_hosts, size_t max_hosts) {
  return {.job = "job",
          .self = host_of(id),
          .endpoint = "host1:1",
          .min_hosts = min_hosts,
          .max_hosts = max_hosts,
          .max_restarts = 3,
          .last_call_timeout = {}};
}

// Returns the table of a running round with the hosts, of which `coordinator` is one.
Table running_table(AgentId coordinator, const std::vector<AgentId>& ids) {
  Table table{.job = "job",
              .epoch = 4,
              .round = 5,
              .phase = Phase::kRunning,
              .coordinator = coordinator,
              .quorums = {ids}};
  for (size_t i = 0; i < ids.size(); ++i) {
    table.hosts.push_back(host_of(ids[i]));
    table.hosts.back().state = HostState::kIn;
    table.hosts.back().node_rank = static_cast<uint32_t>(i);
  }
  return table;
}

Message message_with(MessageKind kind, AgentId sender, Table table, TimePoint time = {}) {
  return {.kind = kind,
          .epoch = table.epoch,
          .time = time,
          .host = host_of(sender),
          .table = std::make_shared<const Table>(std::move(table))};
}

// Returns the time by which the workers are to be killed, if one of the actions since the last call
// says so.
std::optional<TimePoint> time_of_kill(Agent& agent) {
  const auto actions = agent.take_actions();
  const auto found = std::ranges::find(actions, Kind::kKillWorkers, &AgentAction::kind);
  return found == actions.end() ? std::nullopt : std::optional(found->by);
}

// Returns whether one of the actions since the last call is of this kind.
bool has_done(Agent& agent, Kind kind) {
  const auto actions = agent.take_actions();
  return std::ranges::find(actions, kind, &AgentAction::kind) != actions.end();
}

bool has_sent(Agent& agent, MessageKind kind) {
  const auto actions = agent.take_actions();
  return std::ranges::any_of(actions, [&](const AgentAction& action) {
    return action.kind == Kind::kSend && action.message.kind == kind;
  });
}

// A coordinator, and agents that follow it. The connection of agent n is number 2 * n + 1.
struct Coordinator {
  static ConnectionId connection_of(AgentId id) { return 2 * id + 1; }

  void join(TimePoint now, AgentId id, Table table = {.job = "job"}) {
    agent.received(now, connection_of(id), message_with(MessageKind::kJoin, id, std::move(table)));
  }
  void confirm(TimePoint now, AgentId id) {
    agent.received(now, connection_of(id),
                   {.kind = MessageKind::kConfirm,
                    .epoch = agent.table().epoch,
                    .round = agent.table().round});
  }
  void report(TimePoint now, AgentId id, Outcome outcome) {
    agent.received(
        now, connection_of(id),
        {.kind = MessageKind::kReport, .round = agent.table().round, .outcome = outcome});
  }
  void beat(TimePoint now, AgentId id) {
    agent.received(now, connection_of(id), {.kind = MessageKind::kBeat, .time = now});
  }
  // Host 1 at the endpoint, whose agent starts a round with these hosts at time 0.
  void start_round(const std::vector<AgentId>& ids) {
    agent.start(at(0));
    for (const AgentId id : ids) join(at(0), id);
    for (const AgentId id : ids) confirm(at(0), id);
    ASSERT_EQ(phase(), Phase::kRunning);
    agent.take_actions();
  }
  // Returns the connection that the agent opens to the address; 0 if there is none.
  ConnectionId dialed(const std::string& address) {
    for (const AgentAction& action : agent.take_actions()) {
      if (action.kind == Kind::kConnect && action.text == address) return action.connection;
    }
    return 0;
  }
  Phase phase() const { return agent.table().phase; }
  Quorums quorums() const { return agent.table().quorums; }

  Agent agent;
};

// Host 2, which follows host 1 and runs workers from time 0 on.
Agent follower(Table table, size_t min_hosts = 2) {
  Agent agent(options_of(2, min_hosts, table.hosts.size()), 1);
  agent.start(at(0));
  agent.connected(at(0), kUpstream);
  agent.received(at(0), kUpstream, message_with(MessageKind::kTable, 1, std::move(table)));
  EXPECT_TRUE(has_done(agent, Kind::kStartWorkers));
  return agent;
}

TEST(Agent, StartsARoundWhenAllItsHostsHaveConfirmedItsTable) {
  Coordinator coordinator{Agent(options_of(1, 3, 3), 1)};
  coordinator.agent.start(at(0));
  coordinator.join(at(0), 2);
  coordinator.join(at(0), 3);
  EXPECT_EQ(coordinator.phase(), Phase::kStarting);
  coordinator.confirm(at(0), 2);  // hosts 1 and 2 are a majority
  const Table table = coordinator.agent.table();
  for (const auto& [epoch, round] :
       {std::pair(table.epoch - 1, table.round), std::pair(table.epoch, table.round - 1)}) {
    coordinator.agent.received(at(0), Coordinator::connection_of(3),
                               {.kind = MessageKind::kConfirm, .epoch = epoch, .round = round});
  }
  EXPECT_EQ(coordinator.phase(), Phase::kStarting);
  EXPECT_FALSE(has_done(coordinator.agent, Kind::kStartWorkers));
  coordinator.confirm(at(0), 3);
  EXPECT_EQ(coordinator.phase(), Phase::kRunning);
  EXPECT_TRUE(has_done(coordinator.agent, Kind::kStartWorkers));
}

TEST(Agent, TheLeaseCountsFromTheSendingOfTheJoin) {
  Agent agent(options_of(2, 2, 2), 1);
  agent.start(at(0));
  agent.connected(at(0), kUpstream);
  agent.received(at(900), kUpstream,
                 message_with(MessageKind::kTable, 1, running_table(1, {1, 2}), at(0)));
  agent.timer(at(4999));
  EXPECT_FALSE(has_done(agent, Kind::kKillWorkers));
  agent.timer(at(5000));
  EXPECT_TRUE(has_done(agent, Kind::kKillWorkers));
}

TEST(Agent, TheLeaseCountsFromTheSendingOfTheBeat) {
  Agent agent = follower(running_table(1, {1, 2}));
  agent.timer(at(1000));
  agent.received(at(4000), kUpstream, {.kind = MessageKind::kBeatReply, .time = at(1000)});
  agent.timer(at(5999));
  EXPECT_FALSE(has_done(agent, Kind::kKillWorkers));
  EXPECT_LE(agent.next_timer(), at(6000));
  agent.timer(at(6000));
  EXPECT_TRUE(has_done(agent, Kind::kKillWorkers));
}

TEST(Agent, KillsItsWorkersBeforeItConfirmsALaterRound) {
  Table table = running_table(1, {1, 2});
  Agent agent = follower(table);
  ++table.round;
  table.phase = Phase::kStarting;
  agent.received(at(100), kUpstream, message_with(MessageKind::kTable, 1, table));
  const auto actions = agent.take_actions();
  EXPECT_EQ(std::ranges::count(actions, Kind::kKillWorkers, &AgentAction::kind), 1);
  EXPECT_EQ(std::ranges::count(actions, Kind::kSend, &AgentAction::kind), 0);
  agent.workers_ended(at(200), Outcome::kStopped, "");
  EXPECT_TRUE(has_sent(agent, MessageKind::kConfirm));
}

TEST(Agent, KillsItsWorkersWhileTheCoordinatorGathersHosts) {
  Table table = running_table(1, {1, 2});
  Agent agent = follower(table);
  table.phase = Phase::kGathering;
  agent.received(at(100), kUpstream, message_with(MessageKind::kTable, 1, table));
  EXPECT_EQ(time_of_kill(agent), at(100));
}

// The first coordinator, host 1, is lost at 1 s. The lease of its followers ends at 5 s.
TEST(Agent, WorkersThatCanWaitHaveUntilTheEndOfTheOldLeaseIfTheirHostTakesOver) {
  Agent agent = follower(running_table(1, {1, 2, 3}));
  agent.connection_lost(at(1000), kUpstream);
  EXPECT_EQ(time_of_kill(agent), std::nullopt);
  agent.connect_failed(at(1100), kUpstream + 2, /*is_refused=*/true);
  ASSERT_TRUE(agent.is_coordinator());
  EXPECT_EQ(time_of_kill(agent), at(5000));
}

TEST(Agent, WorkersThatCanWaitHaveUntilTheEndOfTheOldLeaseIfAnotherHostTakesOver) {
  Table table = running_table(1, {1, 3, 2});  // host 3 is the next in line
  Agent agent = follower(table);
  agent.connection_lost(at(1000), kUpstream);
  agent.connect_failed(at(1100), kUpstream + 2, /*is_refused=*/true);
  agent.connected(at(1200), kUpstream + 4);
  EXPECT_EQ(time_of_kill(agent), std::nullopt);
  table.coordinator = 3;
  ++table.epoch;
  table.phase = Phase::kGathering;
  const auto answer = [&](int64_t ms) {
    agent.received(at(ms), kUpstream + 4, message_with(MessageKind::kTable, 3, table, at(ms)));
  };
  answer(1200);
  EXPECT_EQ(time_of_kill(agent), at(5000));
  answer(1300);
  EXPECT_EQ(time_of_kill(agent), std::nullopt);
  // A round that has started elsewhere shortens the time.
  ++table.round;
  table.phase = Phase::kStarting;
  answer(1400);
  EXPECT_EQ(time_of_kill(agent), at(1400));
}

TEST(Agent, NoWorkerHasTimeAfterTheEndOfTheOldLease) {
  Agent agent = follower(running_table(1, {1, 2, 3}));
  agent.connection_lost(at(1000), kUpstream);
  agent.take_actions();
  agent.connect_failed(at(5000), kUpstream + 2, /*is_refused=*/true);
  EXPECT_EQ(time_of_kill(agent), at(5000));
}

TEST(Agent, ARoundWaitsForWorkersThatHaveUntilTheEndOfTheOldLease) {
  Coordinator coordinator{Agent(options_of(2, 1, 2), 1)};
  Agent& agent = coordinator.agent;
  agent.start(at(0));
  agent.connected(at(0), kUpstream);
  agent.received(at(0), kUpstream, message_with(MessageKind::kTable, 1, running_table(1, {1, 2})));
  agent.connection_lost(at(1000), kUpstream);
  agent.connect_failed(at(1100), kUpstream + 2, /*is_refused=*/true);
  ASSERT_TRUE(agent.is_coordinator());
  agent.timer(at(4900));
  EXPECT_EQ(coordinator.phase(), Phase::kGathering);
  agent.workers_ended(at(4950), Outcome::kStopped, "");
  agent.timer(at(5000));
  EXPECT_NE(coordinator.phase(), Phase::kGathering);
}

TEST(Agent, GivesAHostUpWhenItsLeaseHasBeenOverForTheMargin) {
  Coordinator coordinator{Agent(options_of(1, 2, 2), 1)};
  coordinator.start_round({2});
  coordinator.agent.timer(at(5999));
  EXPECT_EQ(coordinator.agent.table().find(2)->state, HostState::kIn);
  coordinator.agent.timer(at(6000));
  EXPECT_EQ(coordinator.agent.table().find(2)->state, HostState::kLost);
}

TEST(Agent, AHostThatIsRefusedInTimeHasNoVoteAnyMore) {
  Coordinator coordinator{Agent(options_of(1, 1, 2), 1)};
  coordinator.start_round({2});
  coordinator.agent.connection_lost(at(1000), Coordinator::connection_of(2));
  coordinator.agent.timer(at(1000));
  const ConnectionId probe = coordinator.dialed("host2:1");
  ASSERT_NE(probe, 0U);
  coordinator.agent.connect_failed(at(1100), probe, /*is_refused=*/true);
  EXPECT_EQ(coordinator.quorums(), (Quorums{{1}}));
}

TEST(Agent, AHostThatIsRefusedAfterItWasGivenUpKeepsItsVote) {
  Coordinator coordinator{Agent(options_of(1, 1, 2), 1)};
  coordinator.start_round({2});
  coordinator.agent.connection_lost(at(1000), Coordinator::connection_of(2));
  coordinator.agent.timer(at(6000));  // host 2 can have voted for a round of another coordinator
  const ConnectionId probe = coordinator.dialed("host2:1");
  ASSERT_NE(probe, 0U);
  coordinator.agent.connect_failed(at(6100), probe, /*is_refused=*/true);
  EXPECT_EQ(coordinator.quorums(), (Quorums{{1, 2}}));
}

TEST(Agent, ACoordinatorThatIsRefusedHasNoVoteOnlyWhileTheLeaseIsValid) {
  for (const auto& [time, quorums] :
       {std::pair(at(4999), Quorums{{2}}), std::pair(at(5000), Quorums{{1, 2}})}) {
    Agent agent = follower(running_table(1, {1, 2}), 1);
    agent.connection_lost(at(1000), kUpstream);
    agent.connect_failed(time, kUpstream + 2, /*is_refused=*/true);
    EXPECT_TRUE(agent.is_coordinator());
    EXPECT_EQ(agent.table().quorums, quorums);
  }
}

// The lost coordinator has noticed by then that it has no majority.
TEST(Agent, ANewCoordinatorStartsNoRoundForTwelveSeconds) {
  for (const size_t num_hosts : {2, 3}) {
    const std::vector<AgentId> ids = {1, 2, 3};
    const Table table = running_table(1, {ids.begin(), ids.begin() + static_cast<int>(num_hosts)});
    AgentOptions options = options_of(2, num_hosts - 1, num_hosts);
    options.continues_with_half = true;
    Coordinator coordinator{Agent(options, 1)};
    Agent& agent = coordinator.agent;
    agent.start(at(0));
    agent.connected(at(0), kUpstream);
    agent.received(at(0), kUpstream, message_with(MessageKind::kTable, 1, table));
    agent.connection_lost(at(1000), kUpstream);
    agent.connect_failed(at(1000), kUpstream + 2, /*is_refused=*/false);
    ASSERT_TRUE(agent.is_coordinator());
    agent.workers_ended(at(1000), Outcome::kStopped, "");
    if (num_hosts == 3) coordinator.join(at(1000), 3, table);
    for (int64_t ms = 2000; ms < 13'000; ms += 1000) {
      agent.timer(at(ms));
      if (num_hosts == 3) coordinator.beat(at(ms), 3);
    }
    agent.timer(at(12'999));
    EXPECT_EQ(coordinator.phase(), Phase::kGathering);
    agent.timer(at(13'000));
    EXPECT_NE(coordinator.phase(), Phase::kGathering);
  }
}

TEST(Agent, ACoordinatorStartsNoRoundForTwelveSecondsAfterAFollowerOfAnotherOneHasJoined) {
  Coordinator coordinator{Agent(options_of(1, 2, 4), 1)};
  coordinator.agent.start(at(0));
  for (const AgentId id : {3, 4}) coordinator.join(at(20'000), id, running_table(2, {2, 3, 4}));
  for (int64_t ms = 21'000; ms < 32'000; ms += 1000) {
    for (const AgentId id : {3, 4}) coordinator.beat(at(ms), id);
  }
  coordinator.agent.timer(at(31'999));
  EXPECT_EQ(coordinator.phase(), Phase::kGathering);
  coordinator.agent.timer(at(32'000));
  EXPECT_EQ(coordinator.phase(), Phase::kStarting);
}

TEST(Agent, ARoundWaitsForAHostThatMayFollowAnotherCoordinator) {
  Coordinator coordinator{Agent(options_of(1, 2, 3), 1)};
  coordinator.start_round({2, 3});
  for (int64_t ms = 1000; ms <= 20'000; ms += 1000) {
    for (const AgentId id : {2, 3}) coordinator.beat(at(ms), id);
  }
  coordinator.report(at(20'000), 3, Outcome::kFailed);
  coordinator.report(at(20'000), 2, Outcome::kStopped);
  coordinator.agent.connection_lost(at(20'000), Coordinator::connection_of(2));
  coordinator.agent.workers_ended(at(20'000), Outcome::kStopped, "");
  coordinator.beat(at(25'000), 3);
  coordinator.agent.timer(at(25'999));
  EXPECT_EQ(coordinator.phase(), Phase::kGathering);
  coordinator.agent.timer(at(26'000));
  EXPECT_EQ(coordinator.phase(), Phase::kStarting);
}

TEST(Agent, ARoundNeedsAMajorityOfTheLastRoundAndOfThoseProposedSince) {
  const Quorums quorums = {{2, 3, 4}, {4, 5}};
  for (const Quorums& order : {quorums, Quorums{quorums.rbegin(), quorums.rend()}}) {
    Table table = running_table(2, {2, 3, 4, 5});
    table.quorums = order;
    Coordinator coordinator{Agent(options_of(1, 2, 9), 1)};
    coordinator.agent.start(at(0));
    for (const AgentId id : {4, 5}) coordinator.join(at(0), id, table);
    for (int64_t ms = 1000; ms <= 20'000; ms += 1000) {
      for (const AgentId id : {4, 5}) coordinator.beat(at(ms), id);
    }
    EXPECT_EQ(coordinator.phase(), Phase::kGathering);
    for (const AgentId id : {2, 3}) coordinator.join(at(20'000), id, table);
    EXPECT_EQ(coordinator.phase(), Phase::kStarting);
    EXPECT_EQ(coordinator.quorums(), (Quorums{order[0], order[1], {2, 3, 4, 5, 1}}));
  }
}

// A failure that a restart would only repeat ends the job, wherever it happens: on a host that
// follows, on one that joins a running round again, or on that of the coordinator.
TEST(Agent, AFailureForGoodEndsTheJobWithoutARestart) {
  for (const Outcome outcome : {Outcome::kFailed, Outcome::kFailedForGood}) {
    const Phase expected = outcome == Outcome::kFailed ? Phase::kDraining : Phase::kFailed;
    Coordinator reported{Agent(options_of(1, 2, 2), 1)};
    reported.start_round({2});
    reported.report(at(1000), 2, outcome);
    EXPECT_EQ(reported.phase(), expected);
    EXPECT_EQ(reported.agent.table().restarts_used, outcome == Outcome::kFailed ? 1U : 0U);
    Coordinator joined{Agent(options_of(1, 2, 2), 1)};
    joined.start_round({2});
    Message join = message_with(MessageKind::kJoin, 2, joined.agent.table());
    join.round = joined.agent.table().round;
    join.outcome = outcome;
    joined.agent.received(at(1000), Coordinator::connection_of(2), join);
    EXPECT_EQ(joined.phase(), expected);
    Coordinator own{Agent(options_of(1, 2, 2), 1)};
    own.start_round({2});
    own.agent.workers_ended(at(1000), outcome, "");
    EXPECT_EQ(own.phase(), expected);
  }
}

TEST(Agent, ANewCoordinatorDoesNotForgetTheUsedRestarts) {
  Coordinator coordinator{Agent(options_of(1, 2, 3), 1)};
  coordinator.agent.start(at(0));
  Table table = running_table(2, {2, 3});
  table.restarts_used = 3;
  coordinator.join(at(0), 3, table);
  table.restarts_used = 2;  // the agent has heard less
  coordinator.join(at(0), 2, table);
  EXPECT_EQ(coordinator.agent.table().restarts_used, 3U);
}

}  // namespace
}  // namespace cadre::launch
