// How ranks find and refuse each other; on threads.
#include "cadre/comm/bootstrap/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>

#include "cadre/base/format.h"
#include "cadre/sim/simulator.h"
#include "cadre/store/file_store.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/leftovers.h"
#include "cadre/testing/ranks.h"
#include "cadre/testing/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::RankContext;

struct Variation {
  std::string version = "1.2.3";
  std::string token = "token";
  TransportChoice transport = TransportChoice::kAuto;
  bool comes = true;
};

class MeshTest : public ::testing::Test {
 protected:
  // Each rank hands back "ok" or the error.
  std::vector<std::string> connect_all(const std::vector<Variation>& ranks, Duration budget,
                                       const std::function<void(Mesh&, int)>& look = {}) {
    const auto result =
        testing::run_ranks_as_threads(static_cast<int>(ranks.size()), [&](RankContext& context) {
          const Variation& mine = ranks[static_cast<size_t>(context.rank)];
          context.output = "absent";
          if (!mine.comes) return;
          const Membership membership{context.rank, context.world_size, 9, store_, mine.token};
          auto mesh = connect_mesh(context.system, membership,
                                   {"group", "127.0.0.1", mine.version, mine.transport},
                                   context.system.deadline_in(budget));
          context.output = mesh.ok() ? "ok" : mesh.error().message();
          if (mesh.ok() && look) look(*mesh, context.rank);
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    std::vector<std::string> outputs;
    for (const auto& rank : result.ranks) outputs.push_back(rank.output);
    return outputs;
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>(*system_);
};

TEST_F(MeshTest, OneHostSharesMemoryAndLeavesNoKeyBehind) {
  const auto outputs =
      connect_all(std::vector<Variation>(4), seconds(20), [](Mesh& mesh, int rank) {
        testing::require(mesh.uses_shared_memory, "all ranks are on this host");
        testing::require(mesh.collective.empty(), "no sockets for data");
        testing::require(mesh.host.status_page().num_slots() == 4, "a slot for each");
        for (int peer = 0; peer < 4; ++peer) {
          testing::require((mesh.control[static_cast<size_t>(peer)] != nullptr) == (peer != rank),
                           "one control connection to each peer");
        }
      });
  EXPECT_EQ(outputs, std::vector<std::string>(4, "ok"));
  EXPECT_EQ(store_->num_keys(system_->deadline_in(seconds(1))).value_or_throw(), 0);
}

TEST_F(MeshTest, TcpConnectsEveryPairForEveryPurpose) {
  const std::vector<Variation> ranks(3, {.transport = TransportChoice::kTcp});
  const auto outputs = connect_all(ranks, seconds(20), [](Mesh& mesh, int rank) {
    testing::require(!mesh.uses_shared_memory, "TCP was chosen");
    testing::require(mesh.host.shares_memory(), "the status page is shared all the same");
    for (const auto* sockets : {&mesh.control, &mesh.collective, &mesh.point_to_point}) {
      for (int peer = 0; peer < 3; ++peer) {
        testing::require(((*sockets)[static_cast<size_t>(peer)] != nullptr) == (peer != rank),
                         "a socket to each peer");
      }
    }
  });
  EXPECT_EQ(outputs, std::vector<std::string>(3, "ok"));
}

TEST_F(MeshTest, AnotherBuildIsRefusedWithBothVersions) {
  const auto outputs = connect_all({{}, {.version = "1.2.4"}}, seconds(20));
  for (const std::string& output : outputs) {
    EXPECT_THAT(output, HasSubstr("runs Cadre 1.2.3"));
    EXPECT_THAT(output, HasSubstr("runs Cadre 1.2.4"));
    EXPECT_THAT(output, HasSubstr("use one build on all ranks"));
  }
}

TEST_F(MeshTest, AnotherTokenIsRefusedOnBothSides) {
  const auto outputs = connect_all({{}, {.token = "another"}}, seconds(1));
  EXPECT_THAT(outputs[1], HasSubstr("another job token"));
  // Rank 0 cannot tell rank 1 from a stranger, so it waits for the real one until the deadline.
  EXPECT_NE(outputs[0], "ok");
}

TEST_F(MeshTest, RanksThatDoNotComeAreNamed) {
  const auto outputs = connect_all({{}, {.comes = false}, {}, {.comes = false}}, seconds(1));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(outputs[static_cast<size_t>(rank)],
                HasSubstr("these ranks did not come before the deadline: 1, 3 (of 4)"));
  }
}

TEST_F(MeshTest, AfterAnAttemptThatAllRanksGaveUpTheyConnectAgain) {
  for (int i = 0; i < 3; ++i) {
    const auto refused = connect_all({{}, {.version = "1.2.4"}, {}}, seconds(20));
    for (const std::string& output : refused) EXPECT_THAT(output, HasSubstr("use one build"));
    EXPECT_EQ(connect_all(std::vector<Variation>(3), seconds(20)),
              std::vector<std::string>(3, "ok"));
  }
}

// In virtual time: the second attempt of rank 0 waits for rank 1, and looks at the store meanwhile.
TEST(MeshInTheSimulator, AFailedAttemptDoesNotSpoilTheNext) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const Membership membership{rank, 2, 9, store, "token"};
    const MeshOptions options{"group", "127.0.0.1", "1.2.3"};
    if (rank == 0) {
      const auto failed = connect_mesh(system, membership, options, system.deadline_in(seconds(1)));
      testing::require(!failed.ok(), "rank 1 did not come");
      const std::string message(failed.error().message());
      testing::require(message.find("these ranks did not come before the deadline: 1 (of 2)") !=
                           std::string::npos,
                       message);
    } else {
      system.make_waiter()->park(system.deadline_in(seconds(3)));
    }
    connect_mesh(system, membership, options, system.deadline_in(seconds(20))).value_or_throw();
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

// In virtual time: the first rank gives up and never comes back.
TEST(MeshInTheSimulator, ARankThatComesLateLearnsWhyTheAttemptBeforeFailed) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const Membership membership{rank, 2, 9, store, "token"};
    if (rank == 1) system.make_waiter()->park(system.deadline_in(seconds(3)));
    const TimePoint start = system.now();
    const auto mesh = connect_mesh(system, membership, {"group", "127.0.0.1", "1.2.3"},
                                   system.deadline_in(seconds(rank == 0 ? 1 : 100)));
    testing::require(!mesh.ok(), "the ranks did not meet");
    if (rank == 0) return;
    testing::require(system.now() - start < seconds(10), "it did not wait for its deadline");
    testing::require(mesh.error().details().reporter == 0, "rank 0 said why");
    testing::require(mesh.error().message().find("rank 0 could not connect: these ranks did not "
                                                 "come") != std::string::npos,
                     mesh.error().message());
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

TEST(MeshInTheSimulator, SharedMemoryThatIsDemandedOfSeveralHostsIsRefused) {
  sim::Simulator simulator(1, {.ranks_per_host = {1, 1}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const Membership membership{rank, 2, 9, store, "token"};
    const auto mesh = connect_mesh(
        system, membership,
        {"group", format("10.0.0.{}", rank + 1), "1.2.3", TransportChoice::kSharedMemory},
        system.deadline_in(seconds(20)));
    testing::require(!mesh.ok(), "they share no memory");
    testing::require(mesh.error().code() == ErrorCode::kInvalidArgument, mesh.error().message());
    testing::require(
        mesh.error().message().find("the ranks are on several hosts") != std::string::npos,
        mesh.error().message());
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

// Connections that come before a rank's own, and say nothing or not enough.
TEST_F(MeshTest, SilentStrangersDoNotDelayTheRanksOfAHost) {
  std::vector<std::unique_ptr<os::Socket>> strangers;
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    const Deadline deadline = context.system.deadline_in(seconds(10));
    if (context.rank == 1) {
      const std::string text = store_->get("cadre/9/group/0/card/0", deadline).value_or_throw();
      const wire::RankCard card = wire::decode_card(text).value_or_throw();
      const auto address = os::Address::parse(card.unix_address).value_or_throw();
      for (const size_t num_bytes : {0, 1, 4}) {
        strangers.push_back(context.system.connect(address, deadline).value_or_throw());
        const std::vector<std::byte> bytes(num_bytes, std::byte{1});
        (void)strangers.back()->try_send(bytes).value_or_throw();
      }
    }
    const Membership membership{context.rank, context.world_size, 9, store_, "token"};
    auto mesh = connect_mesh(context.system, membership, {"group", "127.0.0.1", "1.2.3"}, deadline);
    context.output = mesh.ok() ? "ok" : mesh.error().message();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "ok");
}

TEST_F(MeshTest, AStrangersNonsenseEndsItsHandshake) {
  const LinkTerms terms{0, 9, "group", "1.2.3", "token"};
  const auto listener = system_->listen({os::Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
  const Deadline deadline = system_->deadline_in(seconds(5));
  auto stranger = system_->connect(listener->address(), deadline).value_or_throw();
  std::unique_ptr<os::Socket> accepted;
  while (accepted == nullptr) accepted = listener->try_accept().value_or_throw();
  Handshake handshake = Handshake::answer(*system_, std::move(accepted), terms);
  const std::array<std::byte, 8> nonsense{std::byte{0xff}, std::byte{0xff}, std::byte{0xff},
                                          std::byte{0xff}};
  ASSERT_TRUE(stranger->try_send(nonsense).ok());
  Status status;
  while (status.ok() && !deadline.has_passed(system_->now())) status = handshake.step();
  EXPECT_FALSE(status.ok());
  EXPECT_FALSE(handshake.is_done());
}

// In processes, whose number of descriptors is limited for each. Rank 0 may have 64; more strangers
// than that wait silently before rank 1 calls.
TEST(MeshDescriptors, ConnectionsThatSayNothingDoNotExhaustARanksDescriptors) {
  const testing::TemporaryFolder folder;
  const auto result = testing::run_ranks_as_processes(2, [&](RankContext& context) {
    const Deadline deadline = context.system.deadline_in(seconds(20));
    const std::shared_ptr<Store> store =
        FileStore::open(context.system, {.path = folder.file("store"), .num_ranks = 2}, deadline)
            .value_or_throw();
    std::vector<std::unique_ptr<os::Socket>> strangers;
    if (context.rank == 0) {
      const rlimit limit{64, 64};
      testing::require(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    } else {
      const std::string text = store->get("cadre/9/group/0/card/0", deadline).value_or_throw();
      const wire::RankCard card = wire::decode_card(text).value_or_throw();
      for (const std::string& where : {card.tcp_address, card.unix_address}) {
        const auto address = os::Address::parse(where).value_or_throw();
        for (int i = 0; i < 100; ++i) {
          strangers.push_back(context.system.connect(address, deadline).value_or_throw());
        }
      }
    }
    const Membership membership{context.rank, 2, 9, store, "token"};
    const auto mesh =
        connect_mesh(context.system, membership,
                     {"group", "127.0.0.1", "1.2.3", TransportChoice::kTcp}, deadline);
    testing::require(mesh.ok(), mesh.ok() ? "" : mesh.error().message());
    // The strangers stay until rank 0 is connected, too.
    store->barrier("connected", 2, deadline).value_or_throw();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
