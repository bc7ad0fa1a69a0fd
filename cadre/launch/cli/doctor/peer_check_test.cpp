// Tests the measurement between two ranks, what is concluded from it, and the failures of a peer.
#include "cadre/launch/cli/doctor/peer_check.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::cli {
namespace {

using std::chrono::seconds;
using State = FindingState;
using testing::RankContext;

constexpr Duration kPeerPatience = seconds(60);

CommunicatorOptions over_tcp() {
  return {.name = "doctor", .timeout = testing::kRankTimeout, .transport = TransportChoice::kTcp};
}

TEST(DoctorMeasurement, BothEndsAgreeOnBothDirections) {
  std::array<PeerMeasurement, 2> measured;
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    const auto pair = connect_ranks(context, over_tcp());
    measured[static_cast<size_t>(context.rank)] =
        measure_peer(*pair, context.system.deadline_in(testing::kRankTimeout));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(measured[0].sent_bytes_per_s, measured[1].received_bytes_per_s);
  EXPECT_EQ(measured[1].sent_bytes_per_s, measured[0].received_bytes_per_s);
  EXPECT_NE(measured[0].sent_bytes_per_s, measured[0].received_bytes_per_s);
  for (const PeerMeasurement& one : measured) {
    EXPECT_GT(one.sent_bytes_per_s, 0);
    EXPECT_GT(one.round_trip_us_median, 0);
    EXPECT_GE(one.round_trip_us_p99, one.round_trip_us_median);
  }
}

// Rank 1 answers the pings of rank 0 as usual and then announces a stream that nobody could keep in
// memory, or one in pieces without bytes.
TEST(DoctorMeasurement, AStreamThatNoDoctorWouldSendIsRefused) {
  for (const std::array<uint64_t, 2> header :
       {std::array<uint64_t, 2>{8, 0}, std::array<uint64_t, 2>{uint64_t{1} << 40, 8},
        std::array<uint64_t, 2>{8, uint64_t{1} << 40}}) {
    const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
      const auto pair = connect_ranks(context, over_tcp());
      const Deadline deadline = context.system.deadline_in(testing::kRankTimeout);
      if (context.rank == 1) {
        context.output = testing::failure_of([&] { measure_peer(*pair, deadline); });
        return;
      }
      constexpr std::array<int64_t, 2> kLastPing{0, 0};
      std::array<int64_t, 2> answer{};
      pair->send(std::as_bytes(std::span(kLastPing)), DType::kUint8, 1, 1);
      pair->recv(std::as_writable_bytes(std::span(answer)), DType::kUint8, 1, 1);
      pair->send(std::as_bytes(std::span(header)), DType::kUint8, 1, 2);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_TRUE(result.ranks[1].output.starts_with("kCorruption: the peer announces"))
        << result.ranks[1].output;
  }
}

// The doctor that connects, after it has met the listener at the store.
struct ConnectingDoctor {
  os::System& system;
  const Membership& membership;
};

std::unique_ptr<Communicator> connect(const ConnectingDoctor& doctor) {
  return Communicator::connect(doctor.system, doctor.membership, over_tcp(),
                               doctor.system.deadline_in(kPeerPatience));
}

// Plays the doctor that connects, with `body` in place of its measurement, while the listener runs.
// Returns the listener's findings.
std::vector<Finding> listen_to(const std::function<void(const ConnectingDoctor&)>& body,
                               PeerOptions options = {}) {
  const auto system = os::make_native_system();
  std::unique_ptr<os::Thread> peer;
  const auto play = [&](const os::Address& address) {
    peer = system->spawn("doctor-peer", [&, address] {
      const auto join_and_play = [&] {
        TcpRendezvous rendezvous(*system, {.address = address,
                                           .rank = 1,
                                           .world_size = 2,
                                           .job_token = "secret",
                                           .may_host_store = false,
                                           .round = kFirstDoctorRound});
        const auto membership =
            rendezvous.join(system->deadline_in(kPeerPatience)).value_or_throw();
        body({*system, membership});
      };
      EXPECT_EQ(testing::failure_of(join_and_play), "");
    });
  };
  options.listens = true;
  options.address = {os::Address::Kind::kTcp, "127.0.0.1", 0};
  options.token = "secret";
  options.patience = kPeerPatience;
  options.on_listening = play;
  auto findings = check_peer(*system, options);
  if (peer) peer->join();
  return findings;
}

TEST(DoctorPeer, APeerThatLeavesInTheMiddleIsNamed) {
  const auto findings = listen_to([](const ConnectingDoctor& doctor) { connect(doctor); });
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].name, "measurement");
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_NE(findings[0].seen.find("rank 1"), std::string::npos) << findings[0].seen;
}

// A stopped process keeps its connections and sends nothing.
TEST(DoctorPeer, ASilentPeerIsGivenUpAtTheDeadline) {
  const auto stay_silent = [](const ConnectingDoctor& doctor) {
    const auto pair = connect(doctor);
    const Deadline deadline = doctor.system.deadline_in(kPeerPatience);
    while (!pair->error() && !deadline.has_passed(doctor.system.now())) {
      doctor.system.make_waiter()->park(doctor.system.deadline_in(std::chrono::milliseconds(20)));
    }
    EXPECT_TRUE(pair->error());
  };
  const auto findings = listen_to(stay_silent, {.measure_limit = seconds(1)});
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_NE(findings[0].meaning.find("stopped"), std::string::npos) << findings[0].meaning;
}

// A firewall that opens only the port of the store has the same effect as a peer that joins and
// does not connect.
TEST(DoctorPeer, APeerThatCannotConnectIsAProblemOfTheConnection) {
  const auto findings = listen_to(
      [](const ConnectingDoctor& doctor) {
        doctor.system.make_waiter()->park(doctor.system.deadline_in(seconds(2)));
      },
      {.connect_limit = seconds(1)});
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].name, "connection");
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_NE(findings[0].meaning.find("no connection from the peer to this host"), std::string::npos)
      << findings[0].meaning;
}

// The address and the token may be those of a job that is about to start.
TEST(DoctorPeer, AJobIsNotDisturbed) {
  const auto system = os::make_native_system();
  const auto server =
      TcpStoreServer::start(
          *system, {.address = {os::Address::Kind::kTcp, "127.0.0.1", 0}, .token = "secret"})
          .value_or_throw();
  const auto findings = check_peer(
      *system, {.address = server->address(), .token = "secret", .patience = seconds(1)});
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_NE(findings[0].seen.find("but no cadre doctor --listen"), std::string::npos)
      << findings[0].seen;
  std::vector<std::unique_ptr<os::Thread>> ranks;
  std::array<std::string, 2> failures;
  for (const int rank : {0, 1}) {
    ranks.push_back(system->spawn("rank", [&, rank] {
      failures.at(static_cast<size_t>(rank)) = testing::failure_of([&] {
        TcpRendezvous(*system, {.address = server->address(),
                                .rank = rank,
                                .world_size = 2,
                                .job_token = "secret",
                                .may_host_store = false})
            .join(system->deadline_in(kPeerPatience))
            .value_or_throw();
      });
    }));
  }
  for (const auto& rank : ranks) rank->join();
  EXPECT_EQ(failures[0], "");
  EXPECT_EQ(failures[1], "");
}

TEST(DoctorPeer, NobodyComesInTime) {
  const auto system = os::make_native_system();
  const auto findings = check_peer(*system, {.listens = true,
                                             .address = {os::Address::Kind::kTcp, "127.0.0.1", 0},
                                             .patience = std::chrono::milliseconds(50)});
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].name, "connection");
  EXPECT_EQ(findings[0].state, State::kProblem);
  EXPECT_NE(findings[0].seen.find("no peer came to 127.0.0.1:"), std::string::npos)
      << findings[0].seen;
}

TEST(DoctorPeer, APortInUseIsNamed) {
  const auto system = os::make_native_system();
  const auto other = system->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const auto findings = check_peer(
      *system,
      {.listens = true, .address = other->address(), .patience = std::chrono::milliseconds(50)});
  ASSERT_EQ(findings.size(), 1U);
  EXPECT_EQ(findings[0].name, "listen");
  EXPECT_NE(findings[0].seen.find("in use"), std::string::npos) << findings[0].seen;
}

PeerReport good_report() {
  return {.own_address = "10.0.0.2",
          .interface = "eth0",
          .peer_host = "node2",
          .link_bytes_per_s = 1.25e9,
          .measured = {.round_trip_us_median = 40,
                       .round_trip_us_p99 = 90,
                       .sent_bytes_per_s = 1.1e9,
                       .received_bytes_per_s = 1.2e9,
                       .wall_clock_offset_ms = -3}};
}

TEST(DoctorPeer, AGoodNetworkHasNoNote) {
  const auto findings = judge_peer(good_report());
  for (const Finding& finding : findings) EXPECT_EQ(finding.state, State::kOk) << finding.seen;
  ASSERT_EQ(findings.size(), 5U);
  EXPECT_EQ(findings[0].seen, "reached node2 from 10.0.0.2 on eth0, and it reaches this host");
  EXPECT_EQ(findings[1].seen, "40 us median, 90 us p99");
  EXPECT_EQ(findings[2].seen, "1100 MB/s (8.80 Gbit/s)");
  EXPECT_EQ(findings[4].seen, "the peer's is 3.0 ms behind");
}

struct NetworkProblem {
  std::string name;
  std::function<void(PeerReport&)> plant;
  std::string finding;
  State state = State::kNote;
  std::string seen;
  std::string meaning;
};

void PrintTo(const NetworkProblem& problem, std::ostream* out) {
  *out << problem.name;
}

class DoctorNetworkProblems : public ::testing::TestWithParam<NetworkProblem> {};

TEST_P(DoctorNetworkProblems, IsFoundAndNothingElse) {
  const NetworkProblem& problem = GetParam();
  PeerReport report = good_report();
  problem.plant(report);
  bool is_found = false;
  for (const Finding& finding : judge_peer(report)) {
    if (finding.name != problem.finding) {
      EXPECT_EQ(finding.state, State::kOk) << finding.seen;
      continue;
    }
    is_found = true;
    EXPECT_EQ(finding.state, problem.state);
    EXPECT_NE(finding.seen.find(problem.seen), std::string::npos) << finding.seen;
    EXPECT_NE(finding.meaning.find(problem.meaning), std::string::npos) << finding.meaning;
    EXPECT_FALSE(finding.remedy.empty());
  }
  EXPECT_TRUE(is_found);
}

std::string network_name_of(const ::testing::TestParamInfo<NetworkProblem>& test) {
  return test.param.name;
}

INSTANTIATE_TEST_SUITE_P(
    Peer, DoctorNetworkProblems,
    ::testing::Values(
        NetworkProblem{"OneWayOnly", [](PeerReport& report) { report.back_failure = "no route"; },
                       "connection", State::kProblem,
                       "from this host to the peer, but not from the peer to this host: no route",
                       "open connections to each other"},
        NetworkProblem{"SlowRoundTrip",
                       [](PeerReport& report) {
                         report.measured.round_trip_us_median = 30000;
                         report.measured.round_trip_us_p99 = 40000;
                       },
                       "round trip", State::kNote, "30000 us median", "several round trips"},
        NetworkProblem{"Jitter",
                       [](PeerReport& report) { report.measured.round_trip_us_p99 = 5000; },
                       "round trip", State::kNote, "5000 us p99", "far longer"},
        NetworkProblem{"SlowerThanItsLink",
                       [](PeerReport& report) { report.measured.sent_bytes_per_s = 0.3e9; },
                       "to the peer", State::kNote,
                       "300 MB/s (2.40 Gbit/s) of 1250 MB/s (10.00 Gbit/s) of eth0",
                       "lost packets"},
        NetworkProblem{"SlowWithoutKnownLink",
                       [](PeerReport& report) {
                         report.link_bytes_per_s.reset();
                         report.measured.received_bytes_per_s = 10e6;
                       },
                       "from the peer", State::kNote, "10.0 MB/s (80 Mbit/s)", "at least 10.0 s"},
        NetworkProblem{"OtherTime",
                       [](PeerReport& report) { report.measured.wall_clock_offset_ms = 5000; },
                       "wall clocks", State::kNote, "5000.0 ms ahead", "cannot be compared"}),
    network_name_of);

}  // namespace
}  // namespace cadre::cli
