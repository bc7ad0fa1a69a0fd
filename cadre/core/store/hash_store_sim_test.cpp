// Tests that a killed rank loses no item of a HashStore: a queue item that was assigned to that
// rank must go to the next rank that waits.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>

#include "cadre/core/base/format.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;

constexpr Duration kPatience = std::chrono::seconds(100);

struct Popped {
  bool has_item = false;
  TimePoint at;
};

// Ranks 0 and 1 wait in this order for an item of one queue. Rank 2 pushes one item. Then rank 0 is
// killed. If rank 0 has not returned with the item before, rank 1 must get it.
TEST(HashStoreInTheSimulator, AnItemOfAKilledRankWakesTheNextThatWaits) {
  int num_passed_on = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(format("seed {}", seed));
    sim::Simulator simulator(seed, {.ranks_per_host = {3}});
    const auto store = std::make_shared<HashStore>(simulator.system(2));
    std::array<Popped, 2> popped;
    const auto result = simulator.run([&](os::System& system, int rank) {
      system.make_waiter()->park(system.deadline_in(milliseconds(10) * rank));
      if (rank == 2) {
        store->queue_push("q", "item", system.deadline_in(kPatience)).value_or_throw();
        return simulator.kill(0);
      }
      const auto item = store->queue_pop("q", system.deadline_in(kPatience));
      popped[static_cast<size_t>(rank)] = {item.ok(), system.now()};
    });
    EXPECT_EQ(result.failure, "");
    if (popped[0].has_item) continue;
    EXPECT_TRUE(popped[1].has_item);
    EXPECT_LT(popped[1].at, TimePoint{} + kPatience / 2) << "rank 1 was not woken by the item";
    ++num_passed_on;
  }
  EXPECT_GT(num_passed_on, 0);
}

}  // namespace
}  // namespace cadre
