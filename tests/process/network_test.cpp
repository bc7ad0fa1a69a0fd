// Runs ranks on several hosts, for which network namespaces are used. Tests which of their
// addresses they choose, and the errors if two of them cannot connect.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/namespaces.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::Namespaces;
using testing::RankContext;

constexpr uint16_t kPort = 29500;
// The deadline of all calls. It is far longer than any test takes, so a call that reaches it has
// failed.
constexpr Duration kBudget = seconds(60);
// The time in which connecting must succeed or fail, measured from the rendezvous at the store. A
// rank gives up a connection after kConnectPeerTimeout, which is at most half of it, and then
// informs all other ranks at once. The other half is reserve for a busy machine.
constexpr Duration kConnectLimit = seconds(10);
static_assert(2 * kConnectPeerTimeout <= kConnectLimit);

struct Place {
  int host = 0;
  std::string master_addr;  // the name by which this host knows the host of rank 0
  std::string hosts = "";   // lines for the /etc/hosts of this host
};

class NetworkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string obstacle = Namespaces::obstacle();
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
  }

  // Starts each rank on its host, where it joins, connects and sums. Returns for each rank the
  // address at which it listens, or its error.
  std::vector<std::string> run(const Namespaces& network, const std::vector<Place>& places) {
    const int world_size = static_cast<int>(places.size());
    const auto result = testing::run_ranks_as_processes(
        world_size,
        [&](RankContext& context) {
          const Place& place = places[static_cast<size_t>(context.rank)];
          network.enter(place.host, place.hosts);
          const auto system = os::make_native_system();
          context.output = connect_and_talk(*system, place, context.rank, world_size);
        },
        {.time_limit = 2 * kBudget});
    EXPECT_TRUE(result.ok()) << result.failures();
    std::vector<std::string> outputs;
    for (const auto& rank : result.ranks) outputs.push_back(rank.output);
    return outputs;
  }

  // Exchanges data between all pairs of ranks, so each rank must be able to reach every other one.
  static void talk_to_all(Communicator& world) {
    std::vector<int32_t> sent(static_cast<size_t>(world.world_size()), world.rank() + 1);
    std::vector<int32_t> received(sent.size());
    world.all_to_all(std::as_bytes(std::span(sent)), std::as_writable_bytes(std::span(received)),
                     DType::kInt32);
    for (size_t rank = 0; rank < received.size(); ++rank) {
      testing::require(received[rank] == static_cast<int32_t>(rank) + 1,
                       "a rank has received a wrong value");
    }
  }

  static std::string connect_and_talk(os::System& system, const Place& place, Rank rank,
                                      int world_size) {
    const Deadline deadline = system.deadline_in(kBudget);
    const Membership membership =
        TcpRendezvous(system, {.address = {os::Address::Kind::kTcp, place.master_addr, kPort},
                               .rank = rank,
                               .world_size = world_size,
                               .job_token = "secret"})
            .join(deadline)
            .value_or_throw();
    const TimePoint start = system.now();
    std::unique_ptr<Communicator> world;
    const std::string obstacle = testing::failure_of(
        [&] { world = Communicator::connect(system, membership, {}, deadline); });
    testing::require(system.now() - start < kConnectLimit, "connecting took longer than 10 s");
    if (!world) {
      // Rank 0 hosts the store, so it waits until the others have read from the store why
      // connecting has failed.
      if (rank == 0) system.make_waiter()->park(system.deadline_in(std::chrono::seconds(2)));
      return obstacle;
    }
    const std::string failure = testing::failure_of([&] { talk_to_all(*world); });
    if (!failure.empty()) return failure;
    world->close(deadline);
    std::string hosts;
    for (const std::string& host : membership.listen_hosts) {
      hosts += (hosts.empty() ? "" : " ") + host;
    }
    return hosts;
  }
};

TEST_F(NetworkTest, EachRankIsReachedWhereItReachesTheStore) {
  Namespaces network(2);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  EXPECT_EQ(run(network, {{0, "10.77.0.1"}, {1, "10.77.0.1"}}),
            (std::vector<std::string>{"10.77.0.1", "10.77.0.2"}));
}

TEST_F(NetworkTest, AnInterfaceThatLeadsElsewhereIsNotChosen) {
  Namespaces network(3);
  // The first interface of this host does not lead to the other hosts.
  network.link({0, "10.99.0.1/24"}, {2, "10.99.0.2/24"});
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  network.link({1, "10.98.0.1/24"}, {2, "10.98.0.2/24"});
  EXPECT_EQ(run(network, {{1, "10.77.0.2"}, {0, "10.77.0.2"}}),
            (std::vector<std::string>{"10.77.0.2", "10.77.0.1"}));
}

TEST_F(NetworkTest, ANameThatMeansLoopbackAtHomeIsNeverPublished) {
  Namespaces network(2);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  const Place home{0, "node0", "127.0.1.1 node0\n"};
  const Place away{1, "node0", "127.0.1.1 node1\n10.77.0.1 node0\n"};
  // Two ranks are on the host of the store, and connect to it over loopback.
  EXPECT_EQ(run(network, {home, home, away}),
            (std::vector<std::string>{"10.77.0.1", "10.77.0.1", "10.77.0.2"}));
}

TEST_F(NetworkTest, AHostWithTwoLinksIsReachedOverBoth) {
  Namespaces network(3);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  network.link({0, "10.78.0.1/24"}, {2, "10.78.0.2/24"});
  network.forward(0);
  network.ip(1, "route add 10.78.0.0/24 via 10.77.0.1");
  network.ip(2, "route add 10.77.0.0/24 via 10.78.0.1");
  EXPECT_EQ(run(network, {{0, "node0", "127.0.1.1 node0\n"},
                          {1, "node0", "10.77.0.1 node0\n"},
                          {2, "node0", "10.78.0.1 node0\n"}}),
            (std::vector<std::string>{"10.77.0.1 10.78.0.1", "10.77.0.2", "10.78.0.2"}));
}

TEST_F(NetworkTest, IPv6WorksByNumberAndByName) {
  Namespaces network(2);
  network.link({0, "fd77::1/64"}, {1, "fd77::2/64"});
  const std::vector<std::string> expected = {"fd77::1", "fd77::2"};
  EXPECT_EQ(run(network, {{0, "fd77::1"}, {1, "fd77::1"}}), expected);
  EXPECT_EQ(run(network, {{0, "node0", "127.0.1.1 node0\n"}, {1, "node0", "fd77::1 node0\n"}}),
            expected);
}

TEST_F(NetworkTest, RanksWithoutARouteToEachOtherAreBothNamedToAll) {
  Namespaces network(3);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  network.link({0, "10.78.0.1/24"}, {2, "10.78.0.2/24"});
  const auto outputs = run(network, {{0, "node0", "127.0.1.1 node0\n"},
                                     {1, "node0", "10.77.0.1 node0\n"},
                                     {2, "node0", "10.78.0.1 node0\n"}});
  // All ranks report the failure of the rank that tries to open the missing connection.
  EXPECT_THAT(outputs, Each(HasSubstr("rank 1 (node1, pid ")));
  EXPECT_THAT(outputs, Each(HasSubstr("rank 2 (node2, pid ")));
  EXPECT_THAT(outputs, Each(HasSubstr(" cannot reach rank ")));
  EXPECT_THAT(outputs, Each(ContainsRegex("connect to tcp:10.7[78].0.2:")));
  EXPECT_THAT(outputs, Each(HasSubstr("with no interface that leads there")));
  EXPECT_THAT(outputs, Each(HasSubstr("errno 101")));
}

TEST_F(NetworkTest, RanksWhosePacketsAreDroppedAreNamedWithInterfaceAndErrno) {
  Namespaces network(3);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  network.link({0, "10.78.0.1/24"}, {2, "10.78.0.2/24"});
  network.forward(0);
  network.ip(2, "route add 10.77.0.0/24 via 10.78.0.1");
  // This host receives packets from rank 2, but has no route for its answers.
  network.ip(1, "route add blackhole 10.78.0.0/24");
  const auto outputs = run(network, {{0, "node0", "127.0.1.1 node0\n"},
                                     {1, "node0", "10.77.0.1 node0\n"},
                                     {2, "node0", "10.78.0.1 node0\n"}});
  EXPECT_THAT(outputs, Each(HasSubstr("rank 1 (node1, pid ")));
  EXPECT_THAT(outputs, Each(HasSubstr("cannot reach rank 2 (node2, pid ")));
  EXPECT_THAT(outputs, Each(HasSubstr("connect to tcp:10.78.0.2:")));
  EXPECT_THAT(outputs, Each(HasSubstr("errno 22")));
}

TEST_F(NetworkTest, BeyondLoopbackTheStoreServesNobodyWithoutTheToken) {
  Namespaces network(2);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  const os::Address address{os::Address::Kind::kTcp, "10.77.0.1", kPort};
  const auto result = testing::run_ranks_as_processes(2, [&](RankContext& context) {
    network.enter(context.rank);
    const auto system = os::make_native_system();
    const auto connect = [&](const std::string& token, StoreProtocol protocol) {
      return TcpStore::connect(
          *system, {.address = address, .token = token, .protocol = protocol},
          system->deadline_in(seconds(protocol == StoreProtocol::kC10d ? 2 : 20)));
    };
    if (context.rank == 0) {
      testing::require(!TcpStoreServer::start(*system, {.address = address}).ok(),
                       "a server without a token must be refused on this address");
      const auto server =
          TcpStoreServer::start(*system, {.address = address, .token = "secret"}).value_or_throw();
      const auto store = connect("secret", StoreProtocol::kNative).value_or_throw();
      (void)store->get("done", system->deadline_in(seconds(30))).value_or_throw();
      return;
    }
    const auto store = connect("secret", StoreProtocol::kNative).value_or_throw();
    const auto wrong = connect("another", StoreProtocol::kNative);
    testing::require(!wrong.ok() && wrong.error().code() == ErrorCode::kInvalidArgument,
                     "a client with another token must be refused");
    testing::require(!connect("", StoreProtocol::kC10d).ok(),
                     "c10d's protocol must be refused outside of loopback");
    store->set("done", "1", system->deadline_in(seconds(10))).value_or_throw();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The link of the client's host is cut: no packet of the process arrives any more, not even the end
// of its connections. The store must still conclude that the client is lost and carry out its will,
// the writes that the client has registered for this case.
TEST_F(NetworkTest, TheWillOfAClientWhoseHostVanishesIsCarriedOut) {
  Namespaces network(2);
  network.link({0, "10.77.0.1/24"}, {1, "10.77.0.2/24"});
  const os::Address address{os::Address::Kind::kTcp, "10.77.0.1", kPort};
  const testing::TemporaryFolder folder;
  // The client cannot be reached by a message, so a file tells it that the test is over.
  const std::string is_over = folder.file("is_over");
  const auto result = testing::run_ranks_as_processes(2, [&](RankContext& context) {
    network.enter(context.rank);
    const auto system = os::make_native_system();
    std::unique_ptr<TcpStoreServer> server;
    if (context.rank == 0) {
      server = TcpStoreServer::start(
                   *system, {.address = address, .token = "t", .silence_limit = seconds(3)})
                   .value_or_throw();
    }
    const auto store = TcpStore::connect(*system, {.address = address, .token = "t"},
                                         system->deadline_in(seconds(20)))
                           .value_or_throw();
    if (context.rank == 0) {
      (void)store->get("ready", system->deadline_in(seconds(20))).value_or_throw();
      network.ip(1, "link set to0 down");
      testing::require(
          store->get("lost", system->deadline_in(seconds(20))).value_or_throw() == "rank 1",
          "the store did not carry out the client's will");
      std::ofstream(is_over) << "yes";
      return;
    }
    const auto will =
        store->leave_will("lost", "rank 1", system->deadline_in(seconds(20))).value_or_throw();
    store->set("ready", "yes", system->deadline_in(seconds(20))).value_or_throw();
    // A client that exits withdraws its will, so the client waits until the store has carried it
    // out.
    const Deadline end = system->deadline_in(seconds(12));
    while (!std::filesystem::exists(is_over) && !end.has_passed(system->now())) {
      testing::nap(*system, milliseconds(10));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Ranks in different network namespaces share a kernel, but cannot reach each other's unix sockets,
// so they must count as different hosts.
TEST_F(NetworkTest, ProcessesInNetworksOfTheirOwnAreOnHostsOfTheirOwn) {
  Namespaces network(2);
  const auto result = testing::run_ranks_as_processes(3, [&](RankContext& context) {
    network.enter(context.rank / 2);
    context.output = os::make_native_system()->host().boot_id;
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  EXPECT_NE(result.ranks[0].output, result.ranks[2].output);
}

// A rank is killed after the rendezvous at the store, while the ranks of one host connect. The
// others must name it long before their deadline.
TEST(ConnectingTest, ARankThatDiesWhileTheOthersConnectIsNamedAtOnce) {
  const auto result = testing::run_ranks_as_processes(
      4,
      [&](RankContext& context) {
        if (context.rank == 3) {
          // This process runs only the store, as the launcher does in a real job.
          const auto server =
              TcpStoreServer::start(context.system,
                                    {.address = context.rendezvous_address, .token = "t"})
                  .value_or_throw();
          const auto store =
              TcpStore::connect(context.system,
                                {.address = context.rendezvous_address, .token = "t"},
                                context.system.deadline_in(seconds(20)))
                  .value_or_throw();
          const std::vector<std::string> ends = {"end/0", "end/1"};
          store->wait(ends, context.system.deadline_in(kBudget)).value_or_throw();
          return;
        }
        const Deadline deadline = context.system.deadline_in(kBudget);
        const Membership membership =
            TcpRendezvous(context.system, {.address = context.rendezvous_address,
                                           .rank = context.rank,
                                           .world_size = 3,
                                           .job_token = "t",
                                           .may_host_store = false})
                .join(deadline)
                .value_or_throw();
        if (context.rank == 2) std::raise(SIGKILL);
        const TimePoint start = context.system.now();
        context.output = testing::failed_fields_of(
            [&] { Communicator::connect(context.system, membership, {}, deadline); });
        testing::require(context.system.now() - start < kBudget / 2,
                         "the error came only at the deadline");
        membership.store->set(format("end/{}", context.rank), "", deadline).value_or_throw();
      },
      {.time_limit = 2 * kBudget});
  for (const int rank : {0, 1}) {
    const auto& outcome = result.ranks[static_cast<size_t>(rank)];
    EXPECT_EQ(outcome.failure, "");
    EXPECT_EQ(outcome.output, "kPeerLost culprit=2");
  }
}

}  // namespace
}  // namespace cadre
