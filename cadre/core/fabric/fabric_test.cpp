// Tests in the simulator the resources that the groups of a process share, and what happens to them
// when ranks die.
#include "cadre/core/fabric/fabric.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::hours;
using std::chrono::seconds;
using testing::require;

constexpr Duration kFabricBudget = seconds(20);

void expect_fabric_runs_end(const sim::SimResult& result) {
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

// The piece takes half of the rank's slice of the host memory, which also has the group's own
// pieces. So a second piece of this size can be allocated only if the first one was released.
TEST(FabricOfGroups, MemoryThatADeadRankHeldIsUsedAgain) {
  constexpr Duration kKillAt = seconds(30);
  sim::Simulator simulator(
      1, {.ranks_per_host = {2}, .faults = {sim::Fault::kill(1, sim::When::at_time(kKillAt))}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    const auto world = Communicator::connect(system, {rank, 2, 1, store, "token"}, {},
                                             system.deadline_in(kFabricBudget));
    HostMemory& memory = *CommunicatorParts::impl_of(*world).fabric->host_memory();
    const size_t half = memory.layout().slice_bytes / 2 + 4096;
    auto buffer = world->allocate_symmetric(half);
    if (rank == 1) system.make_waiter()->park(system.deadline_in(hours(1)));
    const std::string failure =
        testing::failure_of([&] { world->barrier({.deadline = system.deadline_in(hours(1))}); });
    require(failure.find("kPeerLost") == 0, failure);
    require(!memory.allocate({.num_bytes = half}).ok(), "there is no room for a second piece");
    buffer.reset();
    require(memory.allocate({.num_bytes = half}).ok(), "the piece that the dead rank held is free");
  });
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.ranks[0].failure, "");
}

// The parent is closed first. The fabric is destroyed together with the last group.
TEST(FabricOfGroups, LivesAsLongAsItsLastGroup) {
  sim::Simulator simulator(1, {.ranks_per_host = {2, 1}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto result = simulator.run([&](os::System& system, int rank) {
    CommunicatorOptions options;
    options.listen_host = rank < 2 ? "10.0.0.1" : "10.0.0.2";
    const Deadline deadline = system.deadline_in(kFabricBudget);
    auto world = Communicator::connect(system, {rank, 3, 1, store, "token"}, options, deadline);
    const std::weak_ptr<Fabric> fabric = CommunicatorParts::impl_of(*world).fabric;
    auto group = split(*world, {.color = 0}, deadline);
    world->close(deadline);
    world.reset();
    require(!fabric.expired(), "the remaining group keeps the fabric alive");
    group->barrier();
    group->close(deadline);
    group.reset();
    require(fabric.expired(), "the last group destroyed the fabric");
  });
  expect_fabric_runs_end(result);
}

}  // namespace
}  // namespace cadre
