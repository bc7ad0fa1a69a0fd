// Tests control planes in virtual time, with seeded schedules, latencies and faults.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <set>

#include "cadre/core/base/random.h"
#include "cadre/core/fabric/plane/control_plane.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/testing/core/plane_job.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using sim::Fault;
using sim::When;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::require;

constexpr GroupKey kSimGroup = 7;
// Faults begin at this time, when all ranks have long been connected.
constexpr Duration kFaultsFrom = seconds(2);
constexpr Duration kLookAt = seconds(16);  // all events must have arrived by this time
constexpr Duration kSilenceLimit = seconds(3);

const std::vector<std::vector<int>> kLayouts = {{2, 2}, {1, 1, 1}, {3, 1, 2}, {4, 4, 4, 4}};

struct SimMember {
  os::System& system;
  PlaneJob& job;
  int rank;
  ControlPlane& plane;
  std::shared_ptr<RecordedGroup> group;

  void expect_lost(std::vector<int> lost, std::string_view when) const {
    const std::vector<int> reported = group->lost();
    require(reported == lost,
            format("{}: rank {} was told of {} losses, not {}; first {} by {}", when, rank,
                   reported.size(), lost.size(), reported.empty() ? -1 : reported[0],
                   reported.empty() ? -1 : group->losses()[0].reporter));
    std::erase(lost, rank);
    require(plane.lost_ranks() == lost, format("{}: lost_ranks() of rank {}", when, rank));
  }
};

using MemberMain = std::function<void(SimMember&)>;

sim::SimResult run_plan(uint64_t seed, const std::vector<int>& shape, std::vector<Fault> faults,
                        const MemberMain& body) {
  PlaneJob job = PlaneJob::in_simulator(shape);
  sim::Simulator simulator(seed, {.ranks_per_host = shape, .faults = std::move(faults)});
  return simulator.run([&](os::System& system, int rank) {
    auto plane = job.open(system, rank, {.silence_limit = kSilenceLimit});
    SimMember member{system, job, rank, *plane, std::make_shared<RecordedGroup>(rank)};
    plane->attach(kSimGroup, member.group);
    body(member);
    plane->close(system.deadline_in(seconds(5)));
  });
}

void expect_ended(const sim::SimResult& result, uint64_t seed, const std::vector<int>& shape) {
  EXPECT_EQ(result.failure, "") << "seed " << seed;
  for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
    EXPECT_EQ(result.ranks[rank].failure, "")
        << "seed " << seed << ", " << shape.size() << " hosts, rank " << rank;
  }
}

// Runs the job and expects that every rank ends without a failure.
sim::SimResult expect_run(uint64_t seed, const std::vector<int>& shape, std::vector<Fault> faults,
                          const MemberMain& body) {
  sim::SimResult result = run_plan(seed, shape, std::move(faults), body);
  expect_ended(result, seed, shape);
  return result;
}

// Runs each layout with a tenth of the seeds that other simulations use.
void for_each_run(const std::function<void(uint64_t, const std::vector<int>&, Random&)>& body) {
  for (size_t i = 0; const uint64_t seed : testing::simulator_seeds()) {
    if (i++ % 10 != 0) continue;
    for (const std::vector<int>& shape : kLayouts) {
      Random random(seed * 31 + shape.size());
      body(seed, shape, random);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

int size_of(const std::vector<int>& shape) {
  return std::accumulate(shape.begin(), shape.end(), 0);
}

Duration fault_time(Random& random) {
  return kFaultsFrom + milliseconds(random.below(2000));
}

std::vector<int> pick(Random& random, size_t count, int num_ranks) {
  std::set<int> picked;
  while (picked.size() < count) {
    picked.insert(static_cast<int>(random.below(static_cast<uint64_t>(num_ranks))));
  }
  return {picked.begin(), picked.end()};
}

// Picks two different ranks. The seed decides whether the lower one comes first.
std::array<int, 2> pick_pair(Random& random, uint64_t seed, int num_ranks) {
  const std::vector<int> picked = pick(random, 2, num_ranks);
  return {picked[seed % 2], picked[1 - seed % 2]};
}

TEST(ControlPlaneSimulator, EachLossIsToldToEachSurvivorOnceAndLeavingIsNone) {
  for_each_run([](uint64_t seed, const std::vector<int>& shape, Random& random) {
    const int num_ranks = size_of(shape);
    const auto num_killed = random.below(static_cast<uint64_t>(num_ranks) - 1);
    const std::vector<int> killed = pick(random, num_killed, num_ranks);
    std::vector<Fault> faults;
    for (const int rank : killed)
      faults.push_back(Fault::kill(rank, When::at_time(fault_time(random))));
    const uint64_t leave_seed = random.next();
    expect_run(seed, shape, faults, [&](SimMember& member) {
      sleep_until(member.system, kLookAt);
      member.expect_lost(killed, "at kLookAt");
      Random own(leave_seed + static_cast<uint64_t>(member.rank));
      sleep_until(member.system, kLookAt + milliseconds(own.below(5000)));
      member.plane.close(member.system.deadline_in(seconds(5)));
      member.expect_lost(killed, "after it left");
    });
  });
}

// One rank publishes a failure. Another rank (the victim) is killed or stopped at about that time.
TEST(ControlPlaneSimulator, TheFailureThatOneTellsReachesAll) {
  for_each_run([](uint64_t seed, const std::vector<int>& shape, Random& random) {
    const auto [victim, teller] = pick_pair(random, seed, size_of(shape));
    const Duration at = fault_time(random);
    const Duration tell_at = at + milliseconds(random.below(3)) - milliseconds(1);
    const bool is_stopped = random.below(2) == 0;
    const Fault fault = is_stopped ? Fault::stop(victim, When::at_time(at)).lasting(seconds(2))
                                   : Fault::kill(victim, When::at_time(at));
    expect_run(seed, shape, {fault}, [&](SimMember& member) {
      sleep_until(member.system, tell_at);
      if (member.rank == teller) {
        member.plane.tell_failure(
            {kSimGroup, teller, {ErrorCode::kTimeout, -1, teller, "why", ""}});
        member.plane.tell_left(kSimGroup, 4, {});
      }
      sleep_until(member.system, is_stopped ? at + seconds(1) : kLookAt);
      if (member.rank != teller && (member.rank != victim || !is_stopped)) {
        require(member.group->failures().size() == 1,
                format("rank {} receives the failure", member.rank));
        require(member.group->failures()[0].origin == teller,
                "the rank that published the failure");
        require(member.group->leavings().size() == 1, "one rank has left the group");
      }
      sleep_until(member.system, kLookAt);
      require(member.group->failures().size() == (member.rank == teller ? 0U : 1U), "once");
    });
  });
}

// Returns how many scheduling points the rank passed before `time`.
int64_t points_before(const sim::SimResult& result, int rank, Duration time) {
  const std::string name = format(" rank{}/", rank);
  return std::ranges::count_if(result.history, [&](const std::string& line) {
    return line.find(name) != std::string::npos && std::stoll(line) < time.count();
  });
}

// Rank 1 is killed while it publishes an event. If any other rank receives the event, all of them
// must receive it.
TEST(ControlPlaneSimulator, WhatARankToldSomeBeforeItDiedAllAreTold) {
  int num_runs = 0;
  int num_heard = 0;
  for (const uint64_t seed : testing::test_seeds(4)) {
    std::vector<size_t> heard;
    const auto run_with = [&](std::vector<Fault> faults) {
      heard.clear();
      sim::SimResult result = expect_run(seed, {5, 2}, std::move(faults), [&](SimMember& member) {
        sleep_until(member.system, kFaultsFrom);
        if (member.rank == 1) member.plane.tell_left(kSimGroup, 4, {});
        sleep_until(member.system, kFaultsFrom + seconds(4));
        if (member.rank != 1) heard.push_back(member.group->leavings().size());
      });
      EXPECT_EQ(heard.size(), 6u);
      return result;
    };
    const int64_t first_point = points_before(run_with({}), 1, kFaultsFrom);
    // The history also has lines about the start and end of threads, which are no scheduling
    // points, so the computed first point is not exact. Therefore the range of points is wide.
    for (int64_t point = first_point - 20; point < first_point + 10; ++point) {
      run_with({Fault::kill(1, When::at_point(1, point))});
      const auto [least, most] = std::ranges::minmax(heard);
      EXPECT_EQ(least, most) << "seed " << seed << ", point " << point;
      ++num_runs;
      num_heard += most > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(num_heard, 0) << "rank 1 was always killed before it sent the event";
  EXPECT_LT(num_heard, num_runs) << "rank 1 was always killed after it sent the event";
}

TEST(ControlPlaneSimulator, AStoppedRankKeepsNoOtherFromAnswering) {
  for_each_run([](uint64_t seed, const std::vector<int>& shape, Random& random) {
    const int num_ranks = size_of(shape);
    const auto [stopped, asker] = pick_pair(random, seed, num_ranks);
    const std::vector<Fault> faults = {
        Fault::stop(stopped, When::at_time(kFaultsFrom)).lasting(seconds(2))};
    expect_run(seed, shape, faults, [&](SimMember& member) {
      sleep_until(member.system, kFaultsFrom + milliseconds(500));
      if (member.rank == asker) {
        std::vector<int> all = all_ranks(num_ranks);
        const auto answers =
            member.plane.ask(kSimGroup, all, member.system.deadline_in(seconds(1)));
        std::vector<int> answering;
        for (const StatusAnswer& answer : answers) answering.push_back(answer.rank);
        require(answering == without(all, std::vector<int>{stopped}),
                format("{} answers of {}", answers.size(), num_ranks));
        const TimePoint asked_at = member.system.now();
        (void)member.plane.ask(kSimGroup, answering, member.system.deadline_in(seconds(1)));
        require(member.system.now() - asked_at < milliseconds(900),
                "ask() does not wait for ranks that were not asked");
      }
      sleep_until(member.system, kLookAt);
      member.expect_lost({}, "at kLookAt");
    });
  });
}

// Rank 1 has left the fabric and answers no question. ask() must return an answer that says so, and
// not omit rank 1 as if it were silent.
TEST(ControlPlaneSimulator, ARankThatHasLeftIsAmongTheAnswers) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    expect_run(seed, {1, 1, 1}, {}, [&](SimMember& member) {
      sleep_until(member.system, kFaultsFrom);
      if (member.rank == 1) return;
      sleep_until(member.system, kFaultsFrom + milliseconds(member.rank == 0 ? 100 : 1000));
      if (member.rank == 2) return;
      const auto answers =
          member.plane.ask(kSimGroup, all_ranks(3), member.system.deadline_in(seconds(1)));
      require(answers.size() == 3, "there is an answer for every rank");
      for (const StatusAnswer& answer : answers) {
        require(answer.has_left == (answer.rank == 1), format("rank {}", answer.rank));
      }
    });
  }
}

TEST(ControlPlaneSimulator, ALeaveWaitsForTheReceiptsOfItsPeersUntilItsDeadline) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    const std::vector<Fault> faults = {
        Fault::stop(1, When::at_time(kFaultsFrom)).lasting(seconds(2))};
    expect_run(seed, {1, 1, 1}, faults, [&](SimMember& member) {
      sleep_until(member.system, kFaultsFrom + milliseconds(500));
      if (member.rank != 0) return sleep_until(member.system, kLookAt);
      const TimePoint before = member.system.now();
      member.plane.close(member.system.deadline_in(seconds(1)));
      const Duration took = member.system.now() - before;
      require(took >= seconds(1) && took < milliseconds(1500),
              "close() waits until its deadline for the receipt of rank 1, which is stopped");
    });
  }
}

// The two hosts are connected by the pairs of ranks 0 and 3, and 1 and 4. When these four have
// left, no rank is left to forward the failure that rank 5 has published to rank 2. So rank 5 must
// connect to rank 2 before it leaves.
TEST(ControlPlaneSimulator, ARankThatToldOfAFailureReachesThoseWhosePeersLeftBeforeItLeaves) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    expect_run(seed, {3, 3}, {}, [&](SimMember& member) {
      sleep_until(member.system, kFaultsFrom);
      if (member.rank != 2 && member.rank != 5) return;
      sleep_until(member.system, kFaultsFrom + milliseconds(50));
      if (member.rank == 5) {
        return member.plane.tell_failure({kSimGroup, 5, {ErrorCode::kTimeout, 3, 5, "late", ""}});
      }
      sleep_until(member.system, kFaultsFrom + milliseconds(300));
      require(member.group->failures().size() == 1, "rank 2 has received the failure");
    });
  }
}

// Ranks 0 and 3 of 6 are not neighbours. When ranks 2, 4 and 5 have left, rank 0 is connected to
// rank 1 only, which is partitioned from rank 3 and cannot forward the leave of rank 0 to it.
TEST(ControlPlaneSimulator, ALeaveIsToldToMoreThanOneRankSoThatAPartitionDoesNotHideIt) {
  for (const uint64_t seed : testing::test_seeds(5)) {
    const std::vector<Fault> faults = {Fault::partition(1, 3, When::at_time(kFaultsFrom))};
    expect_run(seed, {1, 1, 1, 1, 1, 1}, faults, [&](SimMember& member) {
      sleep_until(member.system, kFaultsFrom);
      if (member.rank > 3 || member.rank == 2) return;
      sleep_until(member.system, kFaultsFrom + milliseconds(50));
      if (member.rank == 0) return;
      sleep_until(member.system, kFaultsFrom + milliseconds(2800));
      require(member.plane.has_left(0), "rank 0 has left");
      require(!member.plane.loss_of(0), "rank 0 is not lost");
    });
  }
}

TEST(ControlPlaneSimulator, TwoRanksWhoseConnectionIsCutAreLostToAll) {
  for_each_run([](uint64_t seed, const std::vector<int>& shape, Random& random) {
    // Cuts a connection that exists in every layout: between the first two ranks of a host, or
    // between the first ranks of two hosts.
    const int other = shape[0] > 1 ? 1 : shape[0];
    const std::vector<int> cut = {0, other};
    expect_run(seed, shape, {Fault::cut(0, other, When::at_time(fault_time(random)))},
               [&](SimMember& member) {
                 sleep_until(member.system, kLookAt);
                 member.expect_lost(cut, "at kLookAt");
               });
  });
}

// The other ranks detect the loss because no heartbeats arrive, or because a connection attempt
// gets no answer.
TEST(ControlPlaneSimulator, AHostThatCannotBeReachedIsLostToTheOthers) {
  for_each_run([](uint64_t seed, const std::vector<int>& shape, Random& random) {
    std::vector<Fault> faults;
    for (size_t host = 1; host < shape.size(); ++host) {
      faults.push_back(
          Fault::partition(0, static_cast<int>(host), When::at_time(fault_time(random))));
    }
    const std::vector<int> hidden = all_ranks(shape[0]);
    const std::vector<int> others = without(all_ranks(size_of(shape)), hidden);
    expect_run(seed, shape, faults, [&](SimMember& member) {
      sleep_until(member.system, kLookAt);
      const bool is_hidden = member.rank < shape[0];
      member.expect_lost(is_hidden ? others : hidden, "at kLookAt");
    });
  });
}

TEST(ControlPlaneSimulator, ARankThatIsStoppedForLessThanTheLimitIsNotLost) {
  for_each_run([](uint64_t seed, const std::vector<int>& shape, Random& random) {
    const int stopped = pick(random, 1, size_of(shape))[0];
    const std::vector<Fault> faults = {Fault::stop(stopped, When::at_time(fault_time(random)))
                                           .lasting(kSilenceLimit - milliseconds(600))};
    expect_run(seed, shape, faults, [&](SimMember& member) {
      sleep_until(member.system, kLookAt);
      member.expect_lost({}, "at kLookAt");
    });
  });
}

// Rank 0 is connected to ranks 1, 2, 4, 6 and 7, which are all killed. It must connect to ranks 3
// and 5, to which it had no connection.
TEST(ControlPlaneSimulator, RanksThatLostAllTheirNeighboursFindEachOther) {
  for (const uint64_t seed : testing::test_seeds(20)) {
    const std::vector<int> shape(8, 1);
    const std::vector<int> dead = {1, 2, 4, 6, 7};
    std::vector<Fault> faults;
    for (const int rank : dead) faults.push_back(Fault::kill(rank, When::at_time(kFaultsFrom)));
    expect_run(seed, shape, faults, [&](SimMember& member) {
      sleep_until(member.system, kLookAt);
      member.expect_lost(dead, "at kLookAt");
      if (member.rank == 3) member.plane.tell_left(kSimGroup, 8, {});
      sleep_until(member.system, kLookAt + seconds(1));
      require(member.group->leavings().size() == (member.rank == 3 ? 0U : 1U),
              "rank 3's leave has reached this rank");
    });
  }
}

TEST(ControlPlaneSimulator, TwoHostsThatDieLeaveTheOthersConnected) {
  for (const uint64_t seed : testing::test_seeds(10)) {
    const std::vector<int> shape = {4, 4, 4, 4};
    std::vector<int> dead;
    std::vector<Fault> faults;
    for (int rank = 4; rank < 12; ++rank) {
      dead.push_back(rank);
      faults.push_back(Fault::kill(rank, When::at_time(kFaultsFrom)));
    }
    expect_run(seed, shape, faults, [&](SimMember& member) {
      sleep_until(member.system, kLookAt);
      member.expect_lost(dead, "at kLookAt");
      if (member.rank == 13) member.plane.tell_left(kSimGroup, 8, {});
      sleep_until(member.system, kLookAt + seconds(1));
      require(member.group->leavings().size() == (member.rank == 13 ? 0U : 1U), "connected");
    });
  }
}

// A rank is killed at any scheduling point, even while the ranks are still connecting. All others
// must learn of it.
TEST(ControlPlaneSimulator, AKillAtAnyPointIsToldToAllOthers) {
  int num_in_time = 0;
  int num_runs = 0;
  for_each_run([&](uint64_t seed, const std::vector<int>& shape, Random& random) {
    const int victim = pick(random, 1, size_of(shape))[0];
    const auto point = 20 + static_cast<int64_t>(random.below(100));
    const auto result = run_plan(seed, shape, {Fault::kill(victim, When::at_point(victim, point))},
                                 [&](SimMember& member) {
                                   sleep_until(member.system, kLookAt);
                                   const std::vector<int> lost = {victim};
                                   member.expect_lost(lost, "at kLookAt");
                                 });
    // A rank without connections to other hosts has few scheduling points in the run, so the point
    // of the kill may come too late or never.
    const bool was_in_time =
        result.strikes.size() == 1 && result.strikes[0].at < TimePoint{} + (kLookAt - seconds(5));
    num_in_time += was_in_time ? 1 : 0;
    ++num_runs;
    if (was_in_time) expect_ended(result, seed, shape);
  });
  EXPECT_GE(2 * num_in_time, num_runs);
}

}  // namespace
}  // namespace cadre
