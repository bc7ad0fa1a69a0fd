// The whole Communicator in virtual time: many seeds, each another order of events, and faults at
// points that the seed picks. The oracle is the formula of each operation and the rank that the
// seed made the culprit.
//
// CADRE_SIM_SEEDS sets the number of seeds (default 200 of each kind).
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/base/random.h"
#include "cadre/comm/communicator.h"
#include "cadre/sim/simulator.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"
#include "planted_bugs.h"

namespace cadre {
namespace {

using sim::Fault;
using sim::FaultKind;
using sim::SimOptions;
using sim::Simulator;
using sim::When;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::PlantedBug;
using testing::require;

constexpr int kWorldSize = 3;
constexpr Duration kTimeout = seconds(20);

uint64_t num_seeds(uint64_t fallback) {
  const char* text = std::getenv("CADRE_SIM_SEEDS");
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

// What one simulated job came to.
struct Outcome {
  sim::SimResult sim;
  std::vector<std::string> ranks;  // "" when right, else what the rank threw

  bool all_right() const {
    for (const std::string& rank : ranks) {
      if (!rank.empty()) return false;
    }
    return sim.failure.empty();
  }
  std::string describe() const {
    std::string text = sim.failure;
    for (size_t i = 0; i < ranks.size(); ++i) text += format("\n  rank {}: {}", i, ranks[i]);
    return text;
  }
};

// Three sums on two symmetric buffers and on private memory, and a barrier.
void work(Communicator& group) {
  const auto first = group.allocate_symmetric(4096);
  const auto second = group.allocate_symmetric(4096);
  first->local()[7] = std::byte{42};
  const int world = group.world_size();
  for (int round = 0; round < 3; ++round) {
    const std::span<int32_t> values(reinterpret_cast<int32_t*>(second->local().data()), 300);
    for (int32_t& value : values) value = group.rank() + round;
    const Bytes bytes = std::as_writable_bytes(values);
    group.all_reduce(bytes, bytes, DType::kInt32, ReduceOp::kSum);
    for (const int32_t value : values) {
      require(value == world * (world - 1) / 2 + world * round, "wrong sum");
    }
    std::vector<int64_t> all(static_cast<size_t>(world));
    const int64_t mine = 10 * group.rank() + round;
    group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                     DType::kInt64);
    for (int64_t i = 0; i < world; ++i) {
      require(all[static_cast<size_t>(i)] == 10 * i + round, "wrong gather");
    }
  }
  group.barrier();
  require(first->local()[7] == std::byte{42}, "another buffer was written to");
}

struct Plan {
  SimOptions options = {.ranks_per_host = {kWorldSize}};
  TransportChoice transport = TransportChoice::kAuto;
  PlantedBug bug = PlantedBug::kNone;
  int num_groups = 1;  // one after the other, in rounds 1, 2, ...
};

Outcome run_seed(uint64_t seed, const Plan& plan) {
  Simulator simulator(seed, plan.options);
  HashStore shared(simulator.system(0));
  Outcome outcome;
  outcome.ranks.resize(kWorldSize);
  outcome.sim = simulator.run([&](os::System& simulated, int rank) {
    testing::BuggySystem system(simulated, plan.bug);
    const auto store = std::make_shared<testing::BuggyStore>(shared, plan.bug);
    outcome.ranks[static_cast<size_t>(rank)] = "did not end";
    outcome.ranks[static_cast<size_t>(rank)] = testing::failure_of([&] {
      for (int i = 0; i < plan.num_groups; ++i) {
        CommunicatorOptions options;
        options.transport = plan.transport;
        options.timeout = kTimeout;
        // The simulator's address of host r; each rank of such a plan has a host of its own.
        if (plan.options.ranks_per_host.size() > 1) {
          options.listen_host = format("10.0.0.{}", rank + 1);
        }
        const auto round = static_cast<uint64_t>(i) + 1;
        const Membership membership{rank, kWorldSize, round, store, "token"};
        const auto group =
            Communicator::connect(system, membership, options, system.deadline_in(kTimeout));
        work(*group);
        group->close(system.deadline_in(seconds(5)));
      }
    });
  });
  return outcome;
}

TEST(CommunicatorSeeds, DelayReorderingAndSpuriousWakeUpsAloneAlwaysEndRight) {
  Plan plan;
  plan.options.max_nap = hours(1);  // a lost wake-up would become a time-out
  std::array<int, sim::kNumFaultKinds> num_runs{};
  const uint64_t count = num_seeds(200);
  for (uint64_t seed = 1; seed <= count; ++seed) {
    const Outcome outcome = run_seed(seed, plan);
    ASSERT_TRUE(outcome.all_right()) << "seed " << seed << outcome.describe();
    for (int kind = 0; kind < sim::kNumFaultKinds; ++kind) {
      if (outcome.sim.faults.of(static_cast<FaultKind>(kind)) > 0) {
        ++num_runs[static_cast<size_t>(kind)];
      }
    }
  }
  for (const FaultKind kind :
       {FaultKind::kDelay, FaultKind::kReorder, FaultKind::kShortIo, FaultKind::kSpuriousWake}) {
    EXPECT_GE(num_runs[static_cast<size_t>(kind)], static_cast<int>(count / 10))
        << sim::to_string(kind) << " was felt in too few of " << count << " runs";
  }
}

// In an operation a survivor names the victim. While it connects it has no news of others yet, and
// may name a rank that gave up because of the victim.
bool names_culprit(const Outcome& outcome, int rank, int victim) {
  const std::string& said = outcome.ranks[static_cast<size_t>(rank)];
  const bool is_connecting = said.find("connecting rank") != std::string::npos;
  for (int other = 0; other < kWorldSize; ++other) {
    const bool has_failed = !outcome.ranks[static_cast<size_t>(other)].empty();
    const bool may_be_named = other == victim || (is_connecting && other != rank && has_failed);
    const bool is_named = said.find(format(" rank {}", other)) != std::string::npos ||
                          said.find(format("deadline: {} (of", other)) != std::string::npos;
    if (may_be_named && is_named) return true;
  }
  return false;
}

// Whenever a rank is killed, the survivors are done already or name it.
TEST(CommunicatorSeeds, AKilledRankIsNamedByEverySurvivor) {
  int num_named = 0;
  int num_named_in_operations = 0;
  for (uint64_t seed = 1; seed <= num_seeds(200); ++seed) {
    Random random(seed);
    const int victim = static_cast<int>(random.below(kWorldSize));
    // Half of the kills anywhere in the rank's life, half towards its end, in the operations.
    const auto life =
        static_cast<uint64_t>(run_seed(seed, {}).sim.ranks[static_cast<size_t>(victim)].num_points);
    const uint64_t early = seed % 2 == 0 ? 0 : life / 2;
    const auto point = static_cast<int64_t>(1 + early + random.below(life - early));
    Plan plan;
    plan.options.faults = {Fault::kill(victim, When::at_point(victim, point))};
    const Outcome outcome = run_seed(seed, plan);
    SCOPED_TRACE(format("seed {}, rank {} is killed{}", seed, victim, outcome.describe()));
    ASSERT_EQ(outcome.sim.failure, "");
    for (int rank = 0; rank < kWorldSize; ++rank) {
      const std::string& said = outcome.ranks[static_cast<size_t>(rank)];
      if (rank == victim || said.empty()) continue;
      EXPECT_TRUE(names_culprit(outcome, rank, victim)) << said;
      ++num_named;
      if (said.find("connecting rank") == std::string::npos) ++num_named_in_operations;
    }
  }
  EXPECT_GE(num_named, 20);
  EXPECT_GE(num_named_in_operations, 20);
}

Plan three_hosts() {
  Plan plan;
  plan.options.ranks_per_host = {1, 1, 1};
  plan.options.slow_link_probability = 1.0 / 4;
  return plan;
}

TEST(CommunicatorSeeds, SlowLinksBetweenHostsAloneAlwaysEndRight) {
  int num_slow = 0;
  const uint64_t count = num_seeds(200);
  for (uint64_t seed = 1; seed <= count; ++seed) {
    const Outcome outcome = run_seed(seed, three_hosts());
    ASSERT_TRUE(outcome.all_right()) << "seed " << seed << outcome.describe();
    if (outcome.sim.faults.of(FaultKind::kSlowLink) > 0) ++num_slow;
  }
  EXPECT_GE(num_slow, static_cast<int>(count / 10));
}

// A cut between two ranks is the fault of one of the two: each end blames the other.
TEST(CommunicatorSeeds, ACutOrAPartitionIsNamedByItsEnds) {
  std::array<int, 2> num_felt{};
  for (uint64_t seed = 1; seed <= num_seeds(200); ++seed) {
    Random random(seed);
    const int a = static_cast<int>(random.below(kWorldSize));
    const int b = (a + 1) % kWorldSize;
    const When when = When::at_point(a, 60 + static_cast<int64_t>(random.below(400)));
    const bool is_cut = seed % 2 == 0;
    Plan plan = three_hosts();
    plan.options.faults = {is_cut ? Fault::cut(a, b, when) : Fault::partition(a, b, when)};
    const Outcome outcome = run_seed(seed, plan);
    SCOPED_TRACE(format("seed {}, {} between {} and {}{}", seed, is_cut ? "cut" : "partition", a, b,
                        outcome.describe()));
    ASSERT_EQ(outcome.sim.failure, "");
    const FaultKind kind = is_cut ? FaultKind::kCut : FaultKind::kPartition;
    if (outcome.sim.faults.of(kind) > 0) ++num_felt[is_cut ? 0 : 1];
    for (int rank = 0; rank < kWorldSize; ++rank) {
      if (outcome.ranks[static_cast<size_t>(rank)].empty()) continue;
      EXPECT_TRUE(names_culprit(outcome, rank, a) || names_culprit(outcome, rank, b));
    }
  }
  EXPECT_GE(num_felt[0], 20);
  EXPECT_GE(num_felt[1], 20);
}

TEST(CommunicatorSeeds, AReplayedSeedGivesTheSameTrace) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const Outcome first = run_seed(seed, {});
    const Outcome second = run_seed(seed, {});
    EXPECT_EQ(first.sim.trace_hash, second.sim.trace_hash) << "seed " << seed;
    EXPECT_NE(first.sim.trace_hash, run_seed(seed + 100, {}).sim.trace_hash);
  }
}

// The first seed that finds the bug; 0 when none does.
uint64_t find_bug(const Plan& plan, const std::function<bool(const Outcome&)>& is_wrong) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    if (is_wrong(run_seed(seed, plan))) return seed;
  }
  return 0;
}

bool ends_wrong(const Outcome& outcome) {
  return !outcome.all_right();
}

TEST(PlantedBugs, ALostWakeUpIsFound) {
  Plan plan{.bug = PlantedBug::kLostWakeUp};
  plan.options.max_nap = hours(1);
  EXPECT_GT(find_bug(plan, ends_wrong), 0u);
}

// Without the check a rank hears of a death only at its deadline.
TEST(PlantedBugs, AMissingAbortCheckIsFound) {
  constexpr Duration kKillTime = milliseconds(20);
  Plan plan = three_hosts();
  plan.options.faults = {Fault::kill(2, When::at_time(kKillTime))};
  const auto is_late = [&](const Outcome& outcome) {
    for (const int survivor : {0, 1}) {
      // While it connects a rank has its deadline only.
      const std::string& said = outcome.ranks[static_cast<size_t>(survivor)];
      if (said.find("connecting rank") != std::string::npos) continue;
      const Duration lived = outcome.sim.ranks[static_cast<size_t>(survivor)].at - TimePoint{};
      if (lived > kKillTime + seconds(2)) return true;
    }
    return false;
  };
  EXPECT_EQ(find_bug(plan, is_late), 0u);
  plan.bug = PlantedBug::kMissingAbortCheck;
  EXPECT_GT(find_bug(plan, is_late), 0u);
}

TEST(PlantedBugs, ASlotThatWasFreedTwiceIsFound) {
  EXPECT_GT(find_bug({.bug = PlantedBug::kDoubleFreeOfASlot}, ends_wrong), 0u);
}

TEST(PlantedBugs, AStaleRoundIsFound) {
  EXPECT_GT(find_bug({.bug = PlantedBug::kStaleRound, .num_groups = 2}, ends_wrong), 0u);
}

}  // namespace
}  // namespace cadre
