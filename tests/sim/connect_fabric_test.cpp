// Tests how processes of several hosts connect, in virtual time: under seeded schedules and
// networks, with ranks that are killed or stopped at any time, and with 1,024 ranks. CADRE_SEED=n
// runs only that seed; CADRE_FABRIC_HOSTS=n sets the number of hosts of the largest job, with 8
// ranks each.
#include "cadre/core/fabric/bootstrap/connect_fabric.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/fabric/bootstrap/host_segment.h"
#include "cadre/core/fabric/bootstrap/sponsors.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "counting_store.h"

namespace cadre::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kConnectTime = seconds(60);

std::vector<uint64_t> fabric_seeds(uint64_t count) {
  if (const char* one = std::getenv("CADRE_SEED")) return {std::strtoull(one, nullptr, 10)};
  std::vector<uint64_t> all;
  for (uint64_t seed = 1; seed <= count; ++seed) all.push_back(seed);
  return all;
}

const std::vector<std::vector<int>>& host_shapes() {
  static const std::vector<std::vector<int>> shapes = {
      {2}, {1, 1}, {4}, {2, 2}, {3, 1, 2}, {1, 1, 1, 1, 1}, {2, 3, 1, 2, 1}};
  return shapes;
}

int host_of_rank(const std::vector<int>& ranks_per_host, int rank) {
  int host = 0;
  while (rank >= ranks_per_host[static_cast<size_t>(host)]) {
    rank -= ranks_per_host[static_cast<size_t>(host++)];
  }
  return host;
}

FabricOptions simulated_options(int host) {
  return {.id = "world",
          .listen_host = format("10.0.0.{}", host + 1),
          .version = "1.2.3",
          .host_segment_bytes = [](int num_ranks) {
            return kStampBytes * static_cast<size_t>(1 + num_ranks);
          }};
}

// Returns the ranks to which a rank must be connected: the ranks of its host, its sponsor (the rank
// that sends it the layout of the job), and the ranks for which it is the sponsor.
std::set<int> expected_peers(const Layout& layout, int rank) {
  const std::vector<int>& near = layout.ranks_of(layout.host_of(rank));
  std::set<int> peers(near.begin(), near.end());
  for (const int peer : sponsored_by(layout, rank)) peers.insert(peer);
  if (rank != 0) peers.insert(sponsor_of(layout, rank));
  peers.erase(rank);
  return peers;
}

// Sends this rank's number over each connection, and requires that the peer sends the number of the
// expected rank.
void require_right_peers(os::System& system, FabricConnections& fabric, int rank) {
  const Deadline deadline = system.deadline_in(seconds(20));
  const std::set<int> peers = expected_peers(*fabric.layout, rank);
  for (int peer = 0; peer < fabric.layout->num_ranks(); ++peer) {
    const auto& socket = fabric.control[static_cast<size_t>(peer)];
    require((socket != nullptr) == peers.contains(peer), format("the connection to {}", peer));
    const std::byte own{static_cast<uint8_t>(rank)};
    if (socket)
      require(socket->try_send(ConstBytes(&own, 1)).value_or_throw() == 1, "the byte was not sent");
  }
  for (const int peer : peers) {
    os::Socket& socket = *fabric.control[static_cast<size_t>(peer)];
    std::byte byte{};
    while (socket.try_recv(Bytes(&byte, 1)).value_or_throw() == 0) {
      os::PollItem item{.target = &socket, .want_read = true};
      require(system.poll(std::span(&item, 1), deadline), format("rank {} is silent", peer));
    }
    require(byte == std::byte{static_cast<uint8_t>(peer)}, format("not the rank {}", peer));
  }
}

struct RankOfFabric {
  TimePoint began;
  TimePoint ended;
  bool has_begun = false;
  bool is_connected = false;
  std::optional<Error> failure;
};

struct FabricJob {
  sim::SimResult sim;
  std::vector<RankOfFabric> ranks;

  // began() is the time at which the first rank started, ended() the time at which the last one had
  // connected.
  TimePoint began() const { return std::ranges::min(ranks, {}, &RankOfFabric::began).began; }
  TimePoint ended() const { return std::ranges::max(ranks, {}, &RankOfFabric::ended).ended; }
};

// Runs a job whose ranks join at a store on rank 0, which detects lost clients, and then connect.
FabricJob run_fabric_job(uint64_t seed, const std::vector<int>& ranks_per_host,
                         std::vector<sim::Fault> faults, Duration budget) {
  sim::Simulator simulator(seed, {.ranks_per_host = ranks_per_host, .faults = std::move(faults)});
  const int num_ranks = simulator.num_ranks();
  FabricJob job;
  job.ranks.resize(static_cast<size_t>(num_ranks));
  job.sim = simulator.run([&](os::System& system, int rank) {
    RankOfFabric& mine = job.ranks[static_cast<size_t>(rank)];
    const Membership membership =
        TcpRendezvous(system, {.address = {os::Address::Kind::kTcp, "node0", 29500},
                               .rank = rank,
                               .world_size = num_ranks,
                               .job_token = "job"})
            .join(system.deadline_in(seconds(60)))
            .value_or_throw();
    mine.began = system.now();
    mine.has_begun = true;
    auto fabric =
        connect_fabric(system, membership, simulated_options(host_of_rank(ranks_per_host, rank)),
                       system.deadline_in(budget));
    mine.ended = system.now();
    mine.is_connected = fabric.ok();
    if (!fabric.ok()) mine.failure = fabric.error();
    if (fabric.ok() && job.ranks.size() < 256) {
      // The check may fail because other ranks are killed or stopped while it runs.
      const std::string why = failure_of([&] { require_right_peers(system, *fabric, rank); });
      if (!why.empty()) mine.failure = Error(ErrorCode::kInternal, why);
    }
    // Rank 0 keeps the store until all ranks have read there why connecting has failed.
    if (rank == 0) system.make_waiter()->park(system.deadline_in(2 * budget));
  });
  return job;
}

TEST(FabricInTheSimulator, RanksOfAllShapesConnectToTheirHostAndTheTreeOfHosts) {
  for (const uint64_t seed : fabric_seeds(42)) {
    const std::vector<int>& shape = host_shapes()[seed % host_shapes().size()];
    const FabricJob job = run_fabric_job(seed, shape, {}, kConnectTime);
    EXPECT_EQ(job.sim.failure, "") << "seed " << seed;
    for (size_t rank = 0; rank < job.ranks.size(); ++rank) {
      EXPECT_EQ(job.sim.ranks[rank].failure, "") << "rank " << rank << ", seed " << seed;
      const auto& failure = job.ranks[rank].failure;
      EXPECT_FALSE(failure) << "rank " << rank << ", seed " << seed << ": " << failure->message();
    }
  }
}

// Returns a time, determined by `seed`, at which the ranks of this job are connecting.
Duration moment_of(const FabricJob& job, uint64_t seed) {
  const auto span = static_cast<uint64_t>((job.ended() - job.began()).count());
  return job.began() - TimePoint{} +
         Duration(static_cast<int64_t>(Random(seed).below(std::max<uint64_t>(1, span))));
}

// A fault of one rank at a random time while all ranks connect, and the failure that the other
// ranks must report.
struct FaultOfOne {
  sim::Fault (*fault)(int rank, sim::When when) = nullptr;
  Duration budget{};
  ErrorCode code = ErrorCode::kInternal;
  // Returns the time from the fault, or from the start of the job, to the failure of a rank.
  std::function<Duration(const RankOfFabric&, Duration moment)> delay;
  Duration max_delay{};
};

// Checks that each rank that could not connect names the rank with the fault.
void expect_named_to_all(const FaultOfOne& expected) {
  int num_told = 0;
  for (const uint64_t seed : fabric_seeds(80)) {
    const std::vector<int>& shape = host_shapes()[seed % host_shapes().size()];
    const FabricJob whole = run_fabric_job(seed, shape, {}, expected.budget);
    const auto victim = 1 + Random(seed).below(whole.ranks.size() - 1);
    const Duration moment = moment_of(whole, seed);
    const FabricJob job = run_fabric_job(
        seed, shape, {expected.fault(static_cast<int>(victim), sim::When::at_time(moment))},
        expected.budget);
    EXPECT_EQ(job.sim.failure, "") << "seed " << seed;
    for (size_t rank = 0; rank < job.ranks.size(); ++rank) {
      const RankOfFabric& mine = job.ranks[rank];
      if (rank == victim || mine.is_connected) continue;
      const std::string where = format("rank {}, seed {}: ", rank, seed);
      ASSERT_TRUE(mine.failure) << where;
      EXPECT_EQ(mine.failure->code(), expected.code) << where << mine.failure->message();
      EXPECT_EQ(mine.failure->details().culprit, static_cast<int>(victim))
          << where << mine.failure->message();
      EXPECT_LT(expected.delay(mine, moment), expected.max_delay) << where;
      ++num_told;
    }
  }
  const int least = fabric_seeds(2).size() > 1 ? 20 : 0;
  EXPECT_GE(num_told, least);
}

TEST(FabricInTheSimulator, TheDeathOfARankIsToldToAllLongBeforeTheDeadline) {
  expect_named_to_all({.fault = sim::Fault::kill,
                       .budget = kConnectTime,
                       .code = ErrorCode::kPeerLost,
                       .delay = [](const RankOfFabric& rank,
                                   Duration moment) { return rank.ended - TimePoint{} - moment; },
                       .max_delay = seconds(10)});
}

TEST(FabricInTheSimulator, ARankThatIsStoppedIsNamedToAllAtTheDeadline) {
  constexpr Duration kBudget = seconds(10);
  expect_named_to_all(
      {.fault = sim::Fault::stop,
       .budget = kBudget,
       .code = ErrorCode::kTimeout,
       .delay = [](const RankOfFabric& rank, Duration) { return rank.ended - rank.began; },
       .max_delay = kBudget + seconds(4)});
}

// Rank 0 fails because rank 1 is late. Its second attempt waits for rank 1, polls the store in the
// meantime, and must succeed.
TEST(FabricInTheSimulator, AFailedAttemptDoesNotSpoilTheNext) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const Membership membership{rank, 2, 9, store, "token"};
    const FabricOptions options = simulated_options(0);
    if (rank == 0) {
      const auto failed =
          connect_fabric(system, membership, options, system.deadline_in(seconds(1)));
      require(!failed.ok(), "connecting must fail, because rank 1 is late");
      require(failed.error().code() == ErrorCode::kTimeout, failed.error().message());
      require(failed.error().details().culprit == 1, failed.error().message());
    } else {
      system.make_waiter()->park(system.deadline_in(seconds(3)));
    }
    connect_fabric(system, membership, options, system.deadline_in(seconds(20))).value_or_throw();
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

// One rank, which may be rank 0, gives up and does not retry. A rank that starts later must get the
// error of that rank.
TEST(FabricInTheSimulator, ARankThatComesLateLearnsWhyTheAttemptBeforeFailed) {
  for (const int deserter : {0, 1}) {
    sim::Simulator simulator(1, {.ranks_per_host = {2}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      const Membership membership{rank, 2, 9, store, "token"};
      const bool is_late = rank != deserter;
      if (is_late) system.make_waiter()->park(system.deadline_in(seconds(5)));
      const TimePoint start = system.now();
      const auto fabric = connect_fabric(system, membership, simulated_options(0),
                                         system.deadline_in(seconds(is_late ? 100 : 1)));
      require(!fabric.ok(), "connecting must fail on this rank, too");
      if (!is_late) return;
      require(system.now() - start < seconds(10), "the error came only at the deadline");
      require(fabric.error().details().reporter == deserter, fabric.error().message());
      require(fabric.error().code() == ErrorCode::kTimeout, fabric.error().message());
      require(fabric.error().details().culprit == rank, fabric.error().message());
    });
    EXPECT_EQ(result.failure, "");
    for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
  }
}

int num_hosts_of_the_largest_job() {
  const char* const given = std::getenv("CADRE_FABRIC_HOSTS");
  return given == nullptr ? 32 : std::clamp(std::atoi(given), 2, 250);
}

// Checks the numbers of sockets and of store requests that connect_fabric.h and
// bootstrap_exchange.h promise.
TEST(FabricInTheSimulator, ManyHostsMeetWithFewSocketsAndRequests) {
  constexpr int kRanksPerHost = 8;
  const int num_hosts = num_hosts_of_the_largest_job();
  const int num_ranks = num_hosts * kRanksPerHost;
  sim::Simulator simulator(
      1, {.ranks_per_host = std::vector<int>(static_cast<size_t>(num_hosts), kRanksPerHost),
          .delay_probability = 0,
          .slow_link_probability = 0,
          .max_points = 200'000'000});
  const auto inner = std::make_shared<HashStore>(simulator.system(0));
  const auto counts = std::make_shared<StoreCounts>();
  std::vector<int> num_sockets(static_cast<size_t>(num_ranks));
  std::vector<Duration> times(static_cast<size_t>(num_ranks));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const auto store = std::make_shared<CountingStore>(inner, counts);
    const Membership membership{rank, num_ranks, 9, store, "token"};
    const TimePoint start = system.now();
    const auto fabric = connect_fabric(system, membership, simulated_options(rank / kRanksPerHost),
                                       system.deadline_in(kConnectTime))
                            .value_or_throw();
    times[static_cast<size_t>(rank)] = system.now() - start;
    require(fabric.layout->num_hosts() == num_hosts, "the layout has a wrong number of hosts");
    const std::set<int> peers = expected_peers(*fabric.layout, rank);
    for (int peer = 0; peer < num_ranks; ++peer) {
      const bool is_connected = fabric.control[static_cast<size_t>(peer)] != nullptr;
      require(is_connected == peers.contains(peer), format("the connection to {}", peer));
      num_sockets[static_cast<size_t>(rank)] += is_connected ? 1 : 0;
    }
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
  EXPECT_EQ(inner->num_keys(simulator.system(0).deadline_in(seconds(1))).value_or_throw(), 0);
  int total = 0;
  for (const int number : num_sockets) total += number;
  // The connections form a clique on each host, and a tree between the hosts.
  EXPECT_EQ(total / 2, num_hosts * kRanksPerHost * (kRanksPerHost - 1) / 2 + num_hosts - 1);
  // No rank of 256 waits longer than 50 ms, so no rank reads from the store whether others have
  // failed.
  const int64_t least = 6 * num_ranks - 2 + 2 * ((num_ranks + 63) / 64);
  EXPECT_GE(counts->requests, least);
  EXPECT_LE(counts->requests, num_ranks <= 256 ? least : 2 * least);
  std::cerr << format(
      "{} ranks on {} hosts: sockets mean {:.2f} max {}; store requests {} ({:.2f} per rank), "
      "bytes "
      "in {} out {}; {:.1f} ms of virtual time\n",
      num_ranks, num_hosts, static_cast<double>(total) / num_ranks, std::ranges::max(num_sockets),
      counts->requests.load(), static_cast<double>(counts->requests) / num_ranks,
      counts->bytes_in.load(), counts->bytes_out.load(),
      std::chrono::duration<double, std::milli>(std::ranges::max(times)).count());
}

}  // namespace
}  // namespace cadre::testing
