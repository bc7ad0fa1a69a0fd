#include "cadre/core/rendezvous/lost_rank.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/tcp/tcp_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"

namespace cadre {
namespace {

using std::chrono::seconds;

TEST(LostRanks, AreReadAsTheyWereWritten) {
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
  // A child process leaves a will and dies, which ends its connection to the store. It is forked
  // before this process has other threads.
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
    _exit(0);  // runs no destructor
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

}  // namespace
}  // namespace cadre
