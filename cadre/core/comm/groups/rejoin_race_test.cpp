// Tests in virtual time a rank that closes its group in order to rejoin while another of its
// threads still investigates the failure of the group.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/failure/monitor.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::require;

constexpr int kRaceRanks = 3;
constexpr Duration kRaceBudget = seconds(20);

void sleep(os::System& system, Duration time) {
  system.poll({}, system.deadline_in(time));
}

// Fails the group by an investigation that takes longer than the ranks take from abort() to the end
// of close().
void investigate(os::System& system, Monitor& monitor, Duration time) {
  monitor.fail_after([&] {
    sleep(system, time);
    return Finding{{.code = ErrorCode::kAborted, .cause = "the test gave up"}};
  });
}

// Does the same as ProcessGroup::rejoin(), but runs no operation that waits for the failure.
Membership close_and_rejoin(os::System& system, const Membership& membership, Communicator& group) {
  group.abort("this rank rejoins");
  const std::vector<Rank> lost = group.lost_ranks();
  group.close(system.deadline_in(kRaceBudget));
  return rejoin(system, membership, lost, system.deadline_in(kRaceBudget)).value_or_throw();
}

void rejoin_while_another_thread_investigates(os::System& system, const Membership& membership,
                                              Random random) {
  const auto group = Communicator::connect(system, membership, {}, system.deadline_in(kRaceBudget));
  group->barrier();
  const Duration time = milliseconds(50 + random.below(400));
  Monitor& monitor = *CommunicatorParts::impl_of(*group).monitor;
  // Only rank 0 investigates. A member that receives the leave of rank 0 without a failure regards
  // rank 0 as lost.
  const auto investigator =
      membership.rank == 0
          ? system.spawn("investigator", [&] { investigate(system, monitor, time); })
          : nullptr;
  sleep(system, milliseconds(1 + random.below(40)) * (membership.rank.value + 1));
  const Membership next = close_and_rejoin(system, membership, *group);
  if (investigator != nullptr) investigator->join();
  require(next.world_size == kRaceRanks, format("{} ranks rejoined", next.world_size));
}

TEST(RejoinRace, ARankThatClosesWhileItsFailureIsInvestigatedHasNotLeft) {
  for (const uint64_t seed : testing::test_seeds(40)) {
    sim::Simulator simulator(seed, {.ranks_per_host = {kRaceRanks}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      const Membership membership{rank, kRaceRanks, 1, store, "token"};
      rejoin_while_another_thread_investigates(system, membership,
                                               Random(seed * 31 + static_cast<uint64_t>(rank)));
    });
    EXPECT_EQ(result.failure, "") << "seed " << seed;
    for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace cadre
