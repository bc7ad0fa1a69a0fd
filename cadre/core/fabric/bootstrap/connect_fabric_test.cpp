// Tests how the ranks of a job connect or reject each other's connections. The ranks are threads or
// processes of one host; tests/sim/connect_fabric_test.cpp tests several hosts.
#include "cadre/core/fabric/bootstrap/connect_fabric.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/bootstrap/callers.h"
#include "cadre/core/fabric/bootstrap/dial.h"
#include "cadre/core/fabric/bootstrap/host_segment.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/file/file_store.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/scarce_memory.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::RankContext;

constexpr size_t kSegmentBytesPerRank = 16 << 10;
constexpr wire::LinkPurpose kPurposeOfData{1};

FabricOptions fabric_options(const std::string& version = "1.2.3") {
  return {.id = "world",
          .listen_host = "127.0.0.1",
          .version = version,
          .host_segment_bytes = [](int num_ranks) {
            return kStampBytes + static_cast<size_t>(num_ranks) * kSegmentBytesPerRank;
          }};
}

struct FabricVariation {
  std::string version = "1.2.3";
  std::string token = "token";
  bool may_share = true;
  bool comes = true;
  // Wraps the rank's System in one that injects faults. If null, no faults are injected.
  std::function<std::unique_ptr<os::System>(os::System&)> disturb = {};
};

class FabricTest : public ::testing::Test {
 protected:
  using Look = std::function<void(os::System&, FabricConnections&, int rank)>;

  using Describe = std::string (*)(const std::function<void()>&);

  // Connects all ranks and returns a text for each rank: "ok" or its error.
  std::vector<std::string> connect_all(const std::vector<FabricVariation>& ranks, Duration budget,
                                       const Look& look = {},
                                       Describe describe = testing::failure_of) {
    const auto result =
        testing::run_ranks_as_threads(static_cast<int>(ranks.size()), [&](RankContext& context) {
          const FabricVariation& mine = ranks[static_cast<size_t>(context.rank)];
          context.output = "absent";
          if (!mine.comes) return;
          const auto disturbed = mine.disturb ? mine.disturb(context.system) : nullptr;
          os::System& system = disturbed ? *disturbed : context.system;
          const Membership membership{context.rank, context.world_size, 9, store_, mine.token};
          FabricOptions options = fabric_options(mine.version);
          options.may_share_memory = mine.may_share;
          auto fabric = connect_fabric(system, membership, options, system.deadline_in(budget));
          context.output = fabric.ok() ? "ok" : describe([&] { throw fabric.error(); });
          if (fabric.ok() && look) look(system, *fabric, context.rank);
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    std::vector<std::string> outputs;
    for (const auto& rank : result.ranks) outputs.push_back(rank.output);
    return outputs;
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>(*system_);
};

TEST_F(FabricTest, OneHostSharesMemoryAndLeavesNoKeyBehind) {
  std::array<std::atomic<const std::byte*>, 4> segments{};
  const auto outputs = connect_all(
      std::vector<FabricVariation>(4), seconds(20),
      [&](os::System&, FabricConnections& fabric, int rank) {
        testing::require(fabric.layout->num_ranks() == 4, "all ranks are in the layout");
        testing::require(fabric.layout->num_hosts() == 1, "they are on one host");
        testing::require(fabric.obstacle.empty(), fabric.obstacle);
        const Bytes bytes = fabric.host_memory->bytes();
        testing::require(bytes.size() >= kStampBytes + 4 * kSegmentBytesPerRank, "its size");
        testing::require(std::ranges::all_of(bytes.subspan(kStampBytes),
                                             [](std::byte byte) { return byte == std::byte{0}; }),
                         "all bytes behind the stamps are zero");
        segments[static_cast<size_t>(rank)] = bytes.data();
        for (int peer = 0; peer < 4; ++peer) {
          const auto& socket = fabric.control[static_cast<size_t>(peer)];
          testing::require((socket != nullptr) == (peer != rank), "one connection to each peer");
          testing::require(!socket || socket->local_address().kind == os::Address::Kind::kUnix,
                           "the connection is a unix socket");
        }
        testing::require(fabric.identity.rank == rank, "the rank in later handshakes");
      });
  EXPECT_EQ(outputs, std::vector<std::string>(4, "ok"));
  // Threads that use one System share one mapping of a segment.
  for (const auto& segment : segments) EXPECT_EQ(segment.load(), segments[0].load());
  EXPECT_EQ(store_->num_keys(system_->deadline_in(seconds(1))).value_or_throw(), 0);
}

// The same ranks call connect_fabric() twice. In later handshakes all ranks must use the group name
// of one call, and the names of the two calls must differ.
TEST_F(FabricTest, LaterHandshakesAreOfOneConnection) {
  std::array<std::array<std::string, 3>, 2> names;
  for (auto& of_connection : names) {
    const auto outputs = connect_all(std::vector<FabricVariation>(3), seconds(20),
                                     [&](os::System&, FabricConnections& fabric, int rank) {
                                       of_connection[static_cast<size_t>(rank)] =
                                           fabric.identity.group;
                                     });
    EXPECT_EQ(outputs, std::vector<std::string>(3, "ok"));
    EXPECT_THAT(of_connection, ::testing::Each(of_connection[0])) << "one name on all ranks";
    EXPECT_THAT(of_connection[0], ::testing::StartsWith("world#"));
  }
  EXPECT_NE(names[0][0], names[1][0]);
}

TEST_F(FabricTest, AnotherBuildIsRefusedWithBothVersions) {
  const auto outputs = connect_all({{}, {.version = "1.2.4"}, {}}, seconds(20));
  for (const std::string& output : outputs) {
    EXPECT_THAT(output, HasSubstr("kInvalidArgument"));
    EXPECT_THAT(output, HasSubstr("runs Cadre 1.2.3"));
    EXPECT_THAT(output, HasSubstr("runs Cadre 1.2.4"));
    EXPECT_THAT(output, HasSubstr("use one build on all ranks"));
  }
}

TEST_F(FabricTest, AnotherTokenIsRefusedAndAllAreTold) {
  const auto outputs = connect_all({{}, {.token = "another"}, {}}, seconds(20));
  for (const std::string& output : outputs) {
    EXPECT_THAT(output, HasSubstr("rank 1 has another job token than rank 0"));
  }
}

TEST_F(FabricTest, RanksThatDoNotComeAreNamed) {
  const auto outputs = connect_all({{}, {.comes = false}, {}, {.comes = false}}, seconds(1));
  for (const size_t rank : {0, 2}) {
    EXPECT_THAT(outputs[rank], HasSubstr("kTimeout"));
    EXPECT_THAT(outputs[rank],
                HasSubstr("2 of 4 ranks did not come before the deadline: rank 1, rank 3. "));
  }
  EXPECT_THAT(outputs[2], HasSubstr("rank 0 could not connect: 2 of 4"))
      << "rank 2 received the report of rank 0";
}

TEST_F(FabricTest, WithoutRank0TheOthersNameTheMissing) {
  const auto outputs = connect_all({{.comes = false}, {}, {}, {.comes = false}}, seconds(1), {},
                                   testing::failed_fields_of);
  for (const size_t rank : {1, 2}) EXPECT_EQ(outputs[rank], "kTimeout culprit=0");
}

TEST_F(FabricTest, AfterAnAttemptThatAllRanksGaveUpTheyConnectAgain) {
  for (int i = 0; i < 3; ++i) {
    const auto refused =
        connect_all({{}, {.version = "1.2.4"}, {}}, seconds(20), {}, testing::failed_fields_of);
    EXPECT_EQ(refused, std::vector<std::string>(3, "kInvalidArgument culprit=1"));
    EXPECT_EQ(connect_all(std::vector<FabricVariation>(3), seconds(20)),
              std::vector<std::string>(3, "ok"));
  }
}

// Foreign processes connect before a rank does, and send no byte or an incomplete message. The
// ranks must still connect without a delay.
TEST_F(FabricTest, SilentStrangersDoNotDelayTheRanksOfAHost) {
  std::vector<std::unique_ptr<os::Socket>> strangers;
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    const Deadline deadline = context.system.deadline_in(seconds(10));
    if (context.rank == 1) {
      const std::string text = store_->get("cadre/9/world/0/address/0", deadline).value_or_throw();
      const wire::RankAddress rank_address = wire::decode_rank_address(text).value_or_throw();
      const auto address = os::Address::parse(rank_address.unix_address).value_or_throw();
      for (const size_t num_bytes : {0, 1, 4}) {
        strangers.push_back(context.system.connect(address, deadline).value_or_throw());
        const std::vector<std::byte> bytes(num_bytes, std::byte{1});
        (void)strangers.back()->try_send(bytes).value_or_throw();
      }
    }
    const Membership membership{context.rank, context.world_size, 9, store_, "token"};
    auto fabric = connect_fabric(context.system, membership, fabric_options(), deadline);
    context.output = fabric.ok() ? "ok" : fabric.error().message();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, "ok");
}

// The ranks are processes, because the limit of descriptors applies to a process. Rank 0 may have
// 64 descriptors. Before rank 1 connects, foreign processes open more than 64 connections and send
// no byte. Rank 0 must still connect to rank 1.
TEST(FabricDescriptors, ConnectionsThatSayNothingDoNotExhaustARanksDescriptors) {
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
      const std::string text = store->get("cadre/9/world/0/address/0", deadline).value_or_throw();
      const wire::RankAddress rank_address = wire::decode_rank_address(text).value_or_throw();
      for (const std::string& where : {rank_address.tcp_address, rank_address.unix_address}) {
        const auto address = os::Address::parse(where).value_or_throw();
        for (int i = 0; i < 100; ++i) {
          strangers.push_back(context.system.connect(address, deadline).value_or_throw());
        }
      }
    }
    const Membership membership{context.rank, 2, 9, store, "token"};
    const auto fabric = connect_fabric(context.system, membership, fabric_options(), deadline);
    testing::require(fabric.ok(), fabric.ok() ? "" : fabric.error().message());
    // The foreign connections stay open until both ranks are connected.
    store->barrier("connected", 2, deadline).value_or_throw();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A host on which connections to unix sockets fail, as they do between containers.
class NoUnixSystem final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  Result<std::unique_ptr<os::Socket>> connect(const os::Address& address,
                                              Deadline deadline) override {
    if (address.kind == os::Address::Kind::kUnix) {
      return Error(ErrorCode::kUnavailable, "no such name");
    }
    return inner_.connect(address, deadline);
  }
};

TEST_F(FabricTest, WhereUnixSocketsFailTheRanksOfAHostConnectOverTcpAndShareNoMemory) {
  std::vector<FabricVariation> ranks(4);
  ranks[2].disturb = [](os::System& system) { return std::make_unique<NoUnixSystem>(system); };
  const auto outputs =
      connect_all(ranks, seconds(20), [](os::System&, FabricConnections& fabric, int rank) {
        testing::require(fabric.host_memory == nullptr, "no memory is shared");
        testing::require(
            fabric.obstacle == (rank == 0 ? "rank 2 cannot reach rank 0 over a unix socket"
                                          : "rank 0 offers no memory to the ranks of its host"),
            fabric.obstacle);
        for (int peer = 0; peer < 4; ++peer) {
          if (peer == rank) continue;
          // The higher rank opens the connection to the lower one.
          const bool is_tcp = std::max(peer, rank) == 2;
          const auto kind = fabric.control[static_cast<size_t>(peer)]->local_address().kind;
          testing::require((kind == os::Address::Kind::kTcp) == is_tcp,
                           format("the connection to rank {}", peer));
        }
      });
  EXPECT_EQ(outputs, std::vector<std::string>(4, "ok"));
}

TEST_F(FabricTest, ARankThatMayNotShareMemoryKeepsTheOthersFromIt) {
  for (const size_t unwilling : {0, 2}) {
    std::vector<FabricVariation> ranks(3);
    ranks[unwilling].may_share = false;
    const auto outputs = connect_all(
        ranks, seconds(20), [unwilling](os::System&, FabricConnections& fabric, int rank) {
          testing::require(fabric.host_memory == nullptr, "no memory is shared");
          const std::string expected =
              unwilling == 0 ? (rank == 0 ? "rank 0 may not share memory"
                                          : "rank 0 offers no memory to the ranks of its host")
              : rank == 0    ? "rank 2 cannot map memory of rank 0"
                             : "not all ranks of this host can map memory of rank 0";
          testing::require(fabric.obstacle == expected, fabric.obstacle);
        });
    EXPECT_EQ(outputs, std::vector<std::string>(3, "ok"));
  }
}

// A System that sends a segment of its own instead of the leader's. So the memory that the other
// rank maps is not shared with the leader.
class ForeignMemorySystem final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  Result<std::unique_ptr<os::Listener>> listen(const os::Address& address) override {
    auto listener = inner_.listen(address);
    if (!listener.ok() || address.kind != os::Address::Kind::kUnix) return listener;
    return std::unique_ptr<os::Listener>(
        std::make_unique<ForeignListener>(inner_, std::move(listener).value()));
  }

 private:
  // A socket that sends a foreign segment instead of the one that it is given.
  class ForeignSocket final : public os::Socket {
   public:
    ForeignSocket(os::System& system, std::unique_ptr<os::Socket> inner)
        : inner_(std::move(inner)), foreign_(system.create_segment(1 << 20).value_or_throw()) {}
    int poll_handle() const override { return inner_->poll_handle(); }
    Result<size_t> try_send(ConstBytes data) override { return inner_->try_send(data); }
    Result<size_t> try_recv(Bytes buffer) override { return inner_->try_recv(buffer); }
    Result<bool> try_send_segment(const os::SharedMemory& segment) override {
      // The foreign segment contains the leader's stamp, so the rank that maps it does not notice
      // at once that it is the wrong one.
      std::ranges::copy(segment.bytes().first(8), foreign_->bytes().data());
      return inner_->try_send_segment(*foreign_);
    }
    Result<std::unique_ptr<os::SharedMemory>> try_recv_segment() override {
      return inner_->try_recv_segment();
    }
    void shutdown() override { inner_->shutdown(); }
    os::Address local_address() const override { return inner_->local_address(); }
    os::Address peer_address() const override { return inner_->peer_address(); }
    Status check_peer_user() const override { return inner_->check_peer_user(); }

   private:
    std::unique_ptr<os::Socket> inner_;
    std::unique_ptr<os::SharedMemory> foreign_;
  };
  class ForeignListener final : public os::Listener {
   public:
    ForeignListener(os::System& system, std::unique_ptr<os::Listener> inner)
        : system_(system), inner_(std::move(inner)) {}
    int poll_handle() const override { return inner_->poll_handle(); }
    Result<std::unique_ptr<os::Socket>> try_accept() override {
      auto socket = inner_->try_accept();
      if (!socket.ok() || *socket == nullptr) return socket;
      return std::unique_ptr<os::Socket>(
          std::make_unique<ForeignSocket>(system_, std::move(socket).value()));
    }
    os::Address address() const override { return inner_->address(); }

   private:
    os::System& system_;
    std::unique_ptr<os::Listener> inner_;
  };
};

TEST_F(FabricTest, MemoryInWhichTheLeaderDoesNotSeeTheOthersIsNotShared) {
  std::vector<FabricVariation> ranks(2);
  ranks[0].disturb = [](os::System& system) {
    return std::make_unique<ForeignMemorySystem>(system);
  };
  const auto outputs =
      connect_all(ranks, seconds(20), [](os::System&, FabricConnections& fabric, int rank) {
        testing::require(fabric.host_memory == nullptr, "no memory is shared");
        testing::require(rank != 0 || fabric.obstacle == "rank 1 cannot map memory of rank 0",
                         fabric.obstacle);
      });
  EXPECT_EQ(outputs, std::vector<std::string>(2, "ok"));
}

class ScarceSystem final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  Result<std::unique_ptr<os::SharedMemory>> create_segment(size_t num_bytes) override {
    auto segment = inner_.create_segment(num_bytes);
    if (!segment.ok()) return segment.error();
    return std::unique_ptr<os::SharedMemory>(
        std::make_unique<testing::ScarceMemory>(std::move(segment).value(), 0));
  }
};

TEST_F(FabricTest, AFirstPageForWhichThereIsNoMemoryIsToldToAll) {
  std::vector<FabricVariation> ranks(3);
  ranks[0].disturb = [](os::System& system) { return std::make_unique<ScarceSystem>(system); };
  const auto outputs = connect_all(ranks, seconds(20));
  EXPECT_EQ(outputs[0], "kUnavailable: no memory");
  EXPECT_EQ(outputs[1], "kUnavailable: rank 0 could not connect: no memory");
  EXPECT_EQ(outputs[2], outputs[1]);
}

// Accepts connections until a peer has opened a data connection and finished its handshake.
std::unique_ptr<os::Socket> accept_data(os::System& system, FabricConnections& fabric,
                                        Deadline deadline) {
  Callers callers(system, fabric.identity,
                  {fabric.unix_listener.get(), fabric.tcp_listeners.front().get()}, 1);
  while (!deadline.has_passed(system.now())) {
    for (Handshake& handshake : callers.advance()) {
      if (handshake.hello().purpose != wire::LinkPurpose::kControl) return handshake.take();
    }
    std::vector<os::PollItem> items;
    callers.add_interests(items);
    system.poll(items, callers.next_deadline(deadline));
  }
  throw Error(ErrorCode::kTimeout, "nobody called");
}

TEST_F(FabricTest, LaterConnectionsAreDialedWithTheSameIdentity) {
  const auto outputs = connect_all(
      std::vector<FabricVariation>(2), seconds(20),
      [](os::System& system, FabricConnections& fabric, int rank) {
        const Deadline deadline = system.deadline_in(seconds(10));
        if (rank == 1) {
          const auto socket = accept_data(system, fabric, deadline);
          testing::require(socket->local_address().kind == os::Address::Kind::kTcp, "data by TCP");
          return;
        }
        const DialOptions options{fabric.identity, ""};
        const auto socket = dial(system, *fabric.layout, options, 1, kPurposeOfData, deadline);
        testing::require(socket.ok(), socket.ok() ? "" : socket.error().message());
      });
  EXPECT_EQ(outputs, std::vector<std::string>(2, "ok"));
}

TEST_F(FabricTest, ADialToARankThatHasClosedItsListenersSaysThatItIsGone) {
  const auto outputs =
      connect_all(std::vector<FabricVariation>(2), seconds(20),
                  [this](os::System& system, FabricConnections& fabric, int rank) {
                    const Deadline deadline = system.deadline_in(seconds(10));
                    if (rank == 1) {
                      fabric.unix_listener.reset();
                      fabric.tcp_listeners.clear();
                      store_->set("closed", "", deadline).value_or_throw();
                      return;
                    }
                    (void)store_->get("closed", deadline).value_or_throw();
                    for (const auto purpose : {wire::LinkPurpose::kControl, kPurposeOfData}) {
                      const auto socket =
                          dial(system, *fabric.layout, {fabric.identity, ""}, 1, purpose, deadline);
                      testing::require(!socket.ok(), "the dial fails");
                      testing::require(socket.error().code() == ErrorCode::kPeerLost, "the code");
                      testing::require(socket.error().details().culprit == 1, "the culprit");
                      testing::require(socket.error().message().find("cannot reach rank 1 (") !=
                                           std::string::npos,
                                       socket.error().message());
                    }
                  });
  EXPECT_EQ(outputs, std::vector<std::string>(2, "ok"));
}

}  // namespace
}  // namespace cadre
