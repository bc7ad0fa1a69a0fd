// How the ranks of one host connect to their leader, in virtual time.
#include "cadre/comm/bootstrap/host_group.h"

#include <gtest/gtest.h>

#include <array>

#include "cadre/base/format.h"
#include "cadre/rendezvous/rendezvous.h"
#include "cadre/sim/simulator.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/forwarding_system.h"
#include "cadre/testing/ranks.h"
#include "cadre/testing/scarce_memory.h"

namespace cadre {
namespace {

using std::chrono::seconds;

constexpr std::string_view kHostGroupPrefix = "cadre/1/group/0/";

os::Address leader_address() {
  return {os::Address::Kind::kUnix, "host-group-test-0", 0};
}

// Rank `rank` of two ranks on one host.
Result<HostGroup> form_pair(os::System& system, const std::shared_ptr<Store>& store, int rank,
                            os::Listener& listener, Deadline deadline) {
  const LinkTerms terms{rank, 1, "group", "1.2.3", "token"};
  const Membership membership{rank, 2, 1, store, terms.job_token};
  std::array<wire::RankCard, 2> cards;
  for (size_t i = 0; i < cards.size(); ++i) {
    cards[i].boot_id = system.host().boot_id;
    cards[i].probe = i + 1;
  }
  cards[0].unix_address = leader_address().to_string();
  const std::string prefix(kHostGroupPrefix);
  BootstrapWatch watch(system, membership, prefix);
  return HostGroup::form({system, terms, cards, listener, *store, watch, prefix}, deadline);
}

// Rank 1 has told the leader that it comes and connects, but says nothing at first.
TEST(HostGroupTest, TheLeaderDropsASilentConnectionAndTakesTheNext) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const Deadline deadline = system.deadline_in(seconds(60));
    if (rank == 0) {
      const auto listener = system.listen(leader_address()).value_or_throw();
      store->set("listens", "", deadline).value_or_throw();
      const HostGroup group = form_pair(system, store, 0, *listener, deadline).value_or_throw();
      testing::require(group.members().size() == 2, "both ranks are members");
      testing::require(group.obstacle().empty(), group.obstacle());
      return;
    }
    (void)store->get("listens", deadline).value_or_throw();
    const auto silent = system.connect(leader_address(), deadline).value_or_throw();
    store->set(format("{}side/1", kHostGroupPrefix), "connected", deadline).value_or_throw();
    os::PollItem end{.target = silent.get(), .want_read = true};
    testing::require(system.poll(std::span(&end, 1), system.deadline_in(seconds(10))),
                     "the leader kept a silent connection for 10 s");
    std::array<std::byte, 1> byte{};
    const auto received = silent->try_recv(byte);
    testing::require(!received.ok() && received.error().code() == ErrorCode::kPeerLost,
                     "the leader ended the silent connection");
    const auto unused = system.listen({os::Address::Kind::kUnix, "host-group-test-1", 0});
    const HostGroup group = form_pair(system, store, 1, *unused.value(), deadline).value_or_throw();
    testing::require(group.obstacle().empty(), group.obstacle());
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

class FullSystem final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  Result<std::unique_ptr<os::SharedMemory>> create_segment(size_t num_bytes) override {
    auto segment = inner_.create_segment(num_bytes);
    if (!segment.ok()) return segment.error();
    return std::unique_ptr<os::SharedMemory>(
        std::make_unique<testing::ScarceMemory>(std::move(segment).value(), 0));
  }
};

TEST(HostGroupTest, AStatusPageForWhichThereIsNoMemoryIsRefused) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& simulated, int rank) {
    const Deadline deadline = simulated.deadline_in(seconds(60));
    FullSystem full(simulated);
    os::System& system = rank == 0 ? full : simulated;
    const auto listener =
        system.listen({os::Address::Kind::kUnix, format("host-group-test-{}", rank), 0});
    store->set(format("listens/{}", rank), "", deadline).value_or_throw();
    (void)store->get("listens/0", deadline).value_or_throw();
    const auto group = form_pair(system, store, rank, *listener.value(), deadline);
    testing::require(!group.ok(), "the group was formed");
    const ErrorCode expected = rank == 0 ? ErrorCode::kUnavailable : ErrorCode::kPeerLost;
    testing::require(group.error().code() == expected, group.error().message());
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

TEST(HostGroupTest, ALeaderThatIsGoneHandsOutNoSegment) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const Deadline deadline = system.deadline_in(seconds(60));
    const auto listener =
        system.listen({os::Address::Kind::kUnix, format("host-group-test-{}", rank), 0});
    store->set(format("listens/{}", rank), "", deadline).value_or_throw();
    (void)store->get("listens/0", deadline).value_or_throw();
    HostGroup group = form_pair(system, store, rank, *listener.value(), deadline).value_or_throw();
    if (rank == 0) return;
    const auto segment = group.share_segment(system, 4096, nullptr, deadline);
    testing::require(!segment.ok(), "a segment came from nowhere");
    testing::require(segment.error().code() == ErrorCode::kPeerLost, segment.error().message());
    testing::require(segment.error().details().culprit == 0, "rank 0 is at fault");
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

}  // namespace
}  // namespace cadre
