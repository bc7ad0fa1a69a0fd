// Tests the addresses at which ranks can be reached, which were computed by hand, and what ranks
// learn of each other from their entries in the store.
#include "cadre/core/rendezvous/exchange_addresses.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/file_rendezvous.h"
#include "cadre/core/rendezvous/lost_rank.h"
#include "cadre/core/rendezvous/presence.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using Hosts = std::vector<std::string>;

TEST(ListenHosts, AreWhereARankReachesTheStoreFrom) {
  const std::vector<StoreView> views = {{"10.0.0.1", "10.0.0.1"}, {"10.0.0.2", "10.0.0.1"}};
  EXPECT_EQ(choose_listen_hosts(views, 0).value(), Hosts{"10.0.0.1"});
  EXPECT_EQ(choose_listen_hosts(views, 1).value(), Hosts{"10.0.0.2"});
}

TEST(ListenHosts, OfTheStoresHostAreWhereTheOthersReachTheStore) {
  // Ranks 0 and 1 are on the store's host. Ranks 2 and 3 reach it through two of its interfaces.
  const std::vector<StoreView> views = {{"127.0.0.1", "127.0.1.1"},
                                        {"::1", "::1"},
                                        {"10.0.0.2", "10.0.0.1"},
                                        {"fd00::2", "fd00::1"},
                                        {"10.0.0.3", "10.0.0.1"}};
  EXPECT_EQ(choose_listen_hosts(views, 0).value(), (Hosts{"10.0.0.1", "fd00::1"}));
  EXPECT_EQ(choose_listen_hosts(views, 1).value(), (Hosts{"10.0.0.1", "fd00::1"}));
  EXPECT_EQ(choose_listen_hosts(views, 3).value(), Hosts{"fd00::2"});
}

TEST(ListenHosts, AreLoopbackWhileAllAreOnOneHost) {
  EXPECT_EQ(
      choose_listen_hosts({{"127.0.0.1", "127.0.0.1"}, {"127.0.0.1", "127.0.0.1"}}, 1).value(),
      Hosts{"127.0.0.1"});
  EXPECT_EQ(choose_listen_hosts({{"::1", "::1"}, {"::1", "::1"}}, 1).value(), Hosts{"::1"});
  // The ranks see the store over a unix socket.
  EXPECT_EQ(choose_listen_hosts({{}, {}}, 0).value(), Hosts{"127.0.0.1"});
}

TEST(ListenHosts, AreNeverLinkLocal) {
  const auto refused = choose_listen_hosts({{"fe80::1", "fe80::2"}, {"fe80::2", "fe80::2"}}, 0);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalidArgument);
}

TEST(Presence, LostRanksAreReadAsTheyWereWritten) {
  const LostRank first{3, 4711, "node0"};
  const LostRank second{0, 1, "a host"};
  const std::string text = write_lost_rank(first) + "nonsense\n-1 5 x\n" + write_lost_rank(second);
  EXPECT_EQ(read_lost_ranks(text), (std::vector<LostRank>{first, second}));
  EXPECT_TRUE(read_lost_ranks("").empty());
  EXPECT_TRUE(read_lost_ranks("7").empty());
}

class PresenceTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(seconds(20)); }
  std::unique_ptr<os::System> system_ = os::make_native_system();
};

TEST_F(PresenceTest, AWillIsCarriedOutWhenTheConnectionEndsAndNotWhenItIsRetracted) {
  // When a process dies its connections end. A child process, forked before this process has
  // threads, shows that.
  const os::Address address{os::Address::Kind::kUnix,
                            format("cadre-will-test-{}", system_->host().pid), 0};
  const auto connect = [&address](os::System& system) {
    return TcpStore::connect(system, {.address = address, .token = "t"},
                             system.deadline_in(seconds(20)))
        .value_or_throw();
  };
  const pid_t child = fork();
  if (child == 0) {
    const auto system = os::make_native_system();
    const auto own = connect(*system);
    const Deadline patience = system->deadline_in(seconds(20));
    own->wait(std::vector<std::string>{"retracted"}, patience).value_or_throw();
    const auto will = own->leave_will("lost", "died", patience).value_or_throw();
    _exit(0);  // without running destructors
  }
  auto server = TcpStoreServer::start(*system_, {.address = address, .token = "t"});
  ASSERT_TRUE(server.ok()) << server.error().message();
  const auto store = connect(*system_);
  { const auto retracted = store->leave_will("lost", "retracted", soon()).value_or_throw(); }
  ASSERT_TRUE(store->set("retracted", "yes", soon()).ok());
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(store->get("lost", soon()).value(), "died");
}

TEST_F(PresenceTest, WhereNobodyWouldNoticeThereIsNoWill) {
  HashStore store(*system_);
  EXPECT_EQ(store.leave_will("k", "v", soon()).value(), nullptr);
}

TEST_F(PresenceTest, RanksMeetAtAFile) {
  ::cadre::testing::TemporaryFolder folder;
  const std::string path = folder.file("job");
  EXPECT_EQ(parse_file_url("file://" + path).value(), path);
  EXPECT_FALSE(parse_file_url("file://relative").ok());
  EXPECT_FALSE(parse_file_url("tcp://host:1").ok());
  std::vector<std::unique_ptr<os::Thread>> threads;
  std::vector<std::string> read(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.push_back(system_->spawn("rank", [&, rank] {
      auto membership =
          FileRendezvous(*system_, {.path = path, .rank = rank, .world_size = 3}).join(soon());
      ASSERT_TRUE(membership.ok()) << membership.error().message();
      EXPECT_EQ(membership->listen_hosts, Hosts{"127.0.0.1"});
      ASSERT_TRUE(membership->store->set(format("k{}", rank), "v", soon()).ok());
      read[rank] = membership->store->get(format("k{}", (rank + 1) % 3), soon()).value();
      ASSERT_TRUE(membership->store->barrier("done", 3, soon()).ok());
    }));
  }
  for (auto& thread : threads) thread->join();
  EXPECT_EQ(read, (std::vector<std::string>(3, "v")));
  EXPECT_FALSE(std::filesystem::exists(path)) << "the last to leave removes the file";
}

}  // namespace
}  // namespace cadre
