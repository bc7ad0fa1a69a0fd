// Tests in virtual time that a rank dies or is stopped while the survivors of an earlier loss
// rejoin, at every point from the start of rejoin() to the end of connect(). The other ranks must
// always form a group.
#include "cadre/core/comm/groups/rejoin_group.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using sim::Fault;
using sim::When;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::require;

constexpr int kRanks = 4;  // two hosts with two ranks each; rank 0 hosts the store
constexpr Duration kEnd = seconds(60);
constexpr RejoinTimes kTimes{.agreement = seconds(4), .connection = seconds(4)};

std::unique_ptr<Communicator> connect_world(os::System& system, int rank) {
  const Deadline deadline = system.deadline_in(seconds(60));
  TcpRendezvous rendezvous(system, {.address = {os::Address::Kind::kTcp, "node0", 29500},
                                    .rank = rank,
                                    .world_size = kRanks,
                                    .job_token = "token"});
  const Membership membership = rendezvous.join(deadline).value_or_throw();
  auto group = Communicator::connect(system, membership, {}, deadline);
  // This rank may learn of the failure late, when another rank has already connected the next
  // group. That rank then rejoins once more.
  (void)testing::failure_of([&] { group->barrier({.deadline = deadline}); });
  return group;
}

int64_t sum_of_ones(Communicator& group) {
  std::array<int64_t, 1> value = {1};
  const auto bytes = std::as_writable_bytes(std::span(value));
  group.all_reduce(bytes, bytes, DType::kInt64, ReduceOp::kSum,
                   {.deadline = group.system().deadline_in(seconds(4))});
  return value[0];
}

// Rejoins until a group of `world_size` ranks works. This may take several attempts, because a rank
// may also be lost after its connect().
std::unique_ptr<Communicator> rejoin_until(std::unique_ptr<Communicator> group, int world_size) {
  for (int i = 0; i < kRanks; ++i) {
    group = rejoin_group(*group, kTimes);
    try {
      if (sum_of_ones(*group) == world_size) return group;
    } catch (const Error&) {
      // The rank that the test stops was still a member of this group.
    }
  }
  throw Error(ErrorCode::kInternal, format("no group of {} ranks", world_size));
}

// The time at which a rank began to rejoin, and that at which its new group worked.
struct Span {
  TimePoint begin;
  TimePoint end;
};

Span undisturbed(uint64_t seed, int observed) {
  sim::Simulator simulator(seed, {.ranks_per_host = {2, 2}});
  Span span;
  const auto result = simulator.run([&](os::System& system, int rank) {
    auto group = connect_world(system, rank);
    if (rank == observed) span.begin = system.now();
    group = rejoin_group(*group, kTimes);
    if (rank == observed) span.end = system.now();
    require(sum_of_ones(*group) == kRanks, "nobody is lost");
    // Waits, because this rank hosts the store.
    if (rank == 0) system.poll({}, system.deadline_in(seconds(30)));
  });
  EXPECT_EQ(result.failure, "") << "seed " << seed;
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
  return span;
}

// Injects `fault`, which kills or stops rank `victim`. Returns how long the slowest survivor took
// to rejoin.
Duration rejoin_despite(uint64_t seed, int victim, const Fault& fault) {
  sim::Simulator simulator(seed, {.ranks_per_host = {2, 2}, .faults = {fault}});
  Duration longest{};
  const auto result = simulator.run([&](os::System& system, int rank) {
    auto group = connect_world(system, rank);
    const TimePoint begin = system.now();
    if (rank == victim) {
      group = rejoin_group(*group, kTimes);
      system.poll({}, system.deadline_in(kEnd));
      return;
    }
    group = rejoin_until(std::move(group), kRanks - 1);
    longest = std::max(longest, system.now() - begin);
    require(group->world_size() == kRanks - 1, "three are left");
    require(group->rank() == rank - (rank > victim ? 1 : 0), "the ranks keep their order");
    if (rank == 0) system.poll({}, system.deadline_in(kEnd));
  });
  EXPECT_EQ(result.failure, "") << "seed " << seed;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(result.ranks[static_cast<size_t>(rank)].failure, "")
        << "rank " << rank << ", seed " << seed;
  }
  return longest;
}

TEST(RejoinGroup, ARankThatDiesAtAnyPointOfItCostsOneMoreRound) {
  for (const uint64_t seed : testing::test_seeds(40)) {
    Random random(seed);
    const int victim = 1 + static_cast<int>(random.below(kRanks - 1));
    const Span span = undisturbed(seed, victim);
    const auto length = static_cast<uint64_t>((span.end - span.begin).count());
    const Duration at = span.begin - TimePoint{} + Duration(random.below(length));
    const Duration longest = rejoin_despite(seed, victim, Fault::kill(victim, When::at_time(at)));
    // The death is known, so no rank waits for a deadline.
    EXPECT_LT(longest, seconds(2)) << "seed " << seed;
  }
}

TEST(RejoinGroup, ARankThatStandsStillAtAnyPointOfItIsLeftBehind) {
  for (const uint64_t seed : testing::test_seeds(8)) {
    Random random(seed * 7919);
    const int victim = 1 + static_cast<int>(random.below(kRanks - 1));
    const Span span = undisturbed(seed, victim);
    const auto length = static_cast<uint64_t>((span.end - span.begin).count());
    const Duration at = span.begin - TimePoint{} + Duration(random.below(length));
    const Duration longest = rejoin_despite(seed, victim, Fault::stop(victim, When::at_time(at)));
    EXPECT_LE(longest, 2 * (kTimes.agreement + kTimes.connection)) << "seed " << seed;
  }
}

// Rank 3 is stopped between rejoin() and connect(), and the other ranks form the next group without
// it. When it rejoins later, it must get an error and must not disturb them.
TEST(RejoinGroup, ARankThatComesAfterTheNextRoundIsToldSo) {
  for (const uint64_t seed : testing::test_seeds(3)) {
    sim::Simulator simulator(seed, {.ranks_per_host = {2, 2}});
    std::string failure;
    const auto result = simulator.run([&](os::System& system, int rank) {
      auto group = connect_world(system, rank);
      if (rank == kRanks - 1) {
        group->abort("the test");
        system.poll({}, system.deadline_in(seconds(1)));
        const Membership first =
            rejoin(system, group->membership(), {}, system.deadline_in(seconds(20)))
                .value_or_throw();
        system.poll({}, system.deadline_in(seconds(20)));
        failure = testing::failure_of([&] { rejoin_group(*group, kTimes); });
        return;
      }
      group = rejoin_until(std::move(group), kRanks - 1);
      system.poll({}, system.deadline_in(kEnd));
      require(sum_of_ones(*group) == kRanks - 1, "the late rank has not disturbed them");
      if (rank == 0) system.poll({}, system.deadline_in(seconds(30)));
    });
    EXPECT_EQ(result.failure, "") << "seed " << seed;
    for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
    EXPECT_TRUE(failure.starts_with("kAborted: ")) << failure;
    EXPECT_NE(failure.find("rejoin: rank 3 came too late"), std::string::npos) << failure;
  }
}

}  // namespace
}  // namespace cadre
