// Tests in virtual time peers that send nothing although their connection is open. A host that has
// vanished is noticed by its missing heartbeats; a process that was stopped for a while is not
// reported.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using sim::Fault;
using sim::When;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::require;

constexpr Duration kFaultAt = seconds(30);  // long after the group has connected

// Runs two hosts with one rank each. Both ranks call a barrier; rank 1 enters it after `pause`.
sim::SimResult run_pair(uint64_t seed, std::vector<Fault> faults, Duration pause,
                        const std::function<void(os::System&, Communicator&, const Error*)>& look) {
  sim::Simulator simulator(seed, {.ranks_per_host = {1, 1}, .faults = std::move(faults)});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  return simulator.run([&](os::System& system, int rank) {
    CommunicatorOptions options;
    options.timeout = hours(3);
    options.listen_host = format("10.0.0.{}", rank + 1);
    const Membership membership{rank, 2, 1, store, "token"};
    const auto group =
        Communicator::connect(system, membership, options, system.deadline_in(seconds(20)));
    try {
      if (rank == 1) system.make_waiter()->park(system.deadline_in(pause));
      group->barrier();
      look(system, *group, nullptr);
    } catch (const Error& error) {
      look(system, *group, &error);
    }
    group->close(system.deadline_in(seconds(5)));
  });
}

void expect_all_ended(const sim::SimResult& result, uint64_t seed) {
  EXPECT_EQ(result.failure, "") << "seed " << seed;
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "") << "seed " << seed;
}

TEST(Silence, AHostThatVanishedIsNoticedLongBeforeTheDeadlineOfTheOperation) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    const auto result = run_pair(
        seed, {Fault::partition(0, 1, When::at_time(kFaultAt))}, minutes(10),
        [](os::System& system, Communicator& group, const Error* error) {
          require(error != nullptr, "the other host cannot be reached");
          require(error->code() == ErrorCode::kPeerLost, error->message());
          const Rank other = 1 - group.rank().value;
          require(error->details().culprit == other, "the other rank is at fault");
          require(error->message().find("it sends nothing although its connection is open") !=
                      std::string::npos,
                  error->message());
          require(group.lost_ranks() == std::vector<Rank>{other}, "it is known to be lost");
          if (group.rank() == 1)
            return;  // rank 1 slept when the event arrived, so its clock reads a later time
          // The silence is measured from the last heartbeat.
          const Duration silent_for = system.now() - (TimePoint{} + kFaultAt);
          require(silent_for > kDefaultSilenceLimit - seconds(1) &&
                      silent_for < kDefaultSilenceLimit + seconds(5),
                  format("noticed at {} ms", system.now().ns / 1'000'000));
        });
    expect_all_ended(result, seed);
  }
}

void expect_no_failure(os::System&, Communicator&, const Error* error) {
  require(error == nullptr, error == nullptr ? "" : error->message());
}

TEST(Silence, AProcessThatIsStoppedForLessThanTheLimitIsNotLost) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    const auto result = run_pair(
        seed, {Fault::stop(1, When::at_time(kFaultAt)).lasting(kDefaultSilenceLimit - seconds(5))},
        minutes(10), expect_no_failure);
    expect_all_ended(result, seed);
  }
}

// The whole job is stopped, and its ranks are continued one after the other. No rank may be
// reported as silent.
TEST(Silence, IsNotCountedWhileThisProcessIsStoppedItself) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    const auto result =
        run_pair(seed,
                 {Fault::stop(0, When::at_time(kFaultAt)).lasting(minutes(20)),
                  Fault::stop(1, When::at_time(kFaultAt)).lasting(minutes(20) + seconds(30))},
                 minutes(25), expect_no_failure);
    expect_all_ended(result, seed);
  }
}

// Rank 0 waits for rank 1, which has not entered the barrier. Rank 2 has entered it, and is stopped
// while rank 0 polls its peers. The error must name rank 1.
TEST(Silence, OfARankThatIsNotAwaitedDoesNotHideOneThatHasNotCome) {
  constexpr Duration kTimeout = seconds(10);
  for (const uint64_t seed : testing::test_seeds(5)) {
    const TimePoint frozen_at = TimePoint{} + kFaultAt + kTimeout / 2;
    sim::Simulator simulator(
        seed,
        {.ranks_per_host = {3},
         .faults = {Fault::stop(2, When::at_time(frozen_at - TimePoint{})).lasting(2 * kTimeout)}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      const Membership membership{rank, 3, 1, store, "token"};
      const auto group = Communicator::connect(system, membership, {.timeout = kTimeout},
                                               system.deadline_in(seconds(20)));
      const Duration pause = (rank == 1 ? 2 : 1) * kFaultAt;
      system.make_waiter()->park(Deadline(TimePoint{} + pause));
      try {
        group->barrier();
        require(false, "rank 1 comes too late");
      } catch (const Error& error) {
        require(error.details().culprit == Rank(1), error.message());
      }
      group->close(system.deadline_in(seconds(5)));
    });
    expect_all_ended(result, seed);
  }
}

// Rank 0 waits in a barrier for rank 1. Rank 1 waits at the store for rank 2, which is stopped. The
// error must name rank 2.
TEST(Silence, OfARankThatTheAwaitedOneWaitsForAtTheStoreIsNamed) {
  for (const uint64_t seed : testing::test_seeds(3)) {
    sim::Simulator simulator(
        seed, {.ranks_per_host = {3},
               .faults = {Fault::stop(2, When::at_time(kFaultAt)).lasting(seconds(60))}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      const Membership membership{rank, 3, 1, store, "token"};
      const auto group = Communicator::connect(system, membership, {.timeout = seconds(10)},
                                               system.deadline_in(seconds(20)));
      system.make_waiter()->park(Deadline(TimePoint{} + kFaultAt + seconds(1)));
      const std::array<Rank, 2> pair = {1, 2};
      const std::string failure = testing::failure_of([&] {
        if (rank != 0) {
          new_group_over_store(*group, pair, {.store = store, .id = "pair"},
                               system.deadline_in(seconds(40)));
        }
        group->barrier();
      });
      const bool is_named = failure.find("waiting for rank 2 (") != std::string::npos;
      require(rank != 0 || is_named, failure);
      testing::failure_of([&] { group->close(system.deadline_in(seconds(5))); });
    });
    expect_all_ended(result, seed);
  }
}

// The message from rank 2 to rank 1 was lost, so the ranks wait for each other in a cycle. Control
// messages are routed through rank 0, so all ranks answer. Only rank 1 can detect that it cannot
// reach the rank for which it waits.
TEST(Silence, OfTheRanksInACircleOfWaitsTheOneThatCannotReachTheNextIsBelieved) {
  constexpr Duration kTimeout = seconds(10);
  constexpr int kNumRanks = 3;
  for (const uint64_t seed : testing::test_seeds(5)) {
    // Rank 1 may reach its deadline later than the ranks whose finding is uncertain.
    const Duration lag = milliseconds(seed % 2 == 0 ? 0 : 1500);
    sim::Simulator simulator(seed, {.ranks_per_host = {1, 1, 1},
                                    .faults = {Fault::partition(1, 2, When::at_time(kFaultAt))}});
    const auto store = std::make_shared<HashStore>(simulator.system(0));
    const auto result = simulator.run([&](os::System& system, int rank) {
      CommunicatorOptions options{.timeout = kTimeout};
      options.listen_host = format("10.0.0.{}", rank + 1);
      const Membership membership{rank, kNumRanks, 1, store, "token"};
      const auto group =
          Communicator::connect(system, membership, options, system.deadline_in(seconds(20)));
      const Rank next = (rank + 1) % kNumRanks;
      const Rank previous = (rank + kNumRanks - 1) % kNumRanks;
      std::vector<std::byte> byte(1);
      const auto send = [&] { group->send(byte, DType::kUint8, previous, 0); };
      const auto receive = [&] { group->recv(byte, DType::kUint8, next, 0); };
      send();
      receive();
      const Duration late = rank == 1 ? lag : Duration(0);
      system.make_waiter()->park(Deadline(TimePoint{} + 2 * kFaultAt + late));
      try {
        if (rank == 2) send();
        receive();
        if (rank != 2) send();
        require(false, "nothing came from rank 2");
      } catch (const Error& error) {
        require(error.details().reporter == Rank(1), error.message());
        require(error.details().culprit == Rank(2), error.message());
      }
      group->close(system.deadline_in(seconds(5)));
    });
    expect_all_ended(result, seed);
  }
}

}  // namespace
}  // namespace cadre
