#include "cadre/testing/core/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/simulator_ranks.h"

namespace cadre::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(ThreadRanks, ReturnOutputsAndFailuresByRank) {
  const Resources before = count_resources();
  const RanksResult result = run_ranks_as_threads(3, [](RankContext& context) {
    require(context.rank != 1, "rank 1 does not want to");
    context.output = cadre::format("{} of {}", context.rank, context.world_size);
  });
  EXPECT_EQ(result.failures(), "rank 1: exception: check failed: rank 1 does not want to\n");
  EXPECT_EQ(result.ranks[0].output, "0 of 3");
  EXPECT_EQ(result.ranks[2].output, "2 of 3");
  EXPECT_EQ(leftovers_since(before), "");
}

// If a test computes a wrong number of ranks, 0 or less, it must not pass.
TEST(ThreadRanks, WithoutARankAreRefused) {
  for (const int world_size : {0, -1}) {
    EXPECT_EQ(failed_fields_of([&] {
                static_cast<void>(run_ranks_as_threads(world_size, [](RankContext&) {}));
              }),
              "kInvalidArgument");
  }
}

TEST(ThreadRanks, MayThrowWhatIsNoException) {
  const RankMain rank_main = [](RankContext& context) {
    if (context.rank == 1) throw 1;  // NOLINT(hicpp-exception-baseclass)
  };
  constexpr std::string_view kFailure = "rank 1: an exception that is no std::exception\n";
  EXPECT_EQ(run_ranks_as_threads(2, rank_main).failures(), kFailure);
  EXPECT_EQ(run_ranks_in_simulator(1, {}, 2, rank_main).failures(), kFailure);
}

int sum_over_ranks(Communicator& group) {
  int sum = group.rank().value + 1;
  const auto bytes = std::as_writable_bytes(std::span(&sum, 1));
  group.all_reduce(bytes, bytes, DType::kInt32, ReduceOp::kSum);
  return sum;
}

TEST(ThreadRanks, ConnectAGroup) {
  for (const int world_size : {1, 3}) {
    const RanksResult result = run_ranks_as_threads(world_size, [](RankContext& context) {
      const auto group = connect_ranks(context);
      context.output = cadre::format("{}", sum_over_ranks(*group));
      group->close(context.system.deadline_in(kRankTimeout));
    });
    EXPECT_EQ(result.failures(), "");
    EXPECT_EQ(result.ranks[0].output, world_size == 1 ? "1" : "6");
  }
}

// When rank 1 throws, the other ranks must fail at once instead of waiting until their deadline.
TEST(ThreadRanks, ThatThrowEndTheOthers) {
  const auto system = os::make_native_system();
  const TimePoint begin = system->now();
  const RanksResult result = run_ranks_as_threads(3, [](RankContext& context) {
    const auto group = connect_ranks(context);
    static_cast<void>(sum_over_ranks(*group));
    require(context.rank != 1, "rank 1 has found a wrong number");
    static_cast<void>(sum_over_ranks(*group));
  });
  EXPECT_EQ(result.ranks[1].failure, "exception: check failed: rank 1 has found a wrong number");
  for (const size_t other : {0, 2}) {
    EXPECT_NE(result.ranks[other].failure.find("kPeerLost"), std::string::npos)
        << result.failures();
    EXPECT_NE(result.ranks[other].failure.find("rank 1"), std::string::npos) << result.failures();
  }
  EXPECT_LT(system->now() - begin, kRankTimeout / 2);
}

TEST(SimulatedRanks, ConnectAGroupAcrossHostsAndRepeatBySeed) {
  const auto run = [](uint64_t seed) {
    return run_ranks_in_simulator(seed, {.ranks_per_host = {2, 1}}, 3, [](RankContext& context) {
      const auto group = connect_ranks(context);
      require(group->hosts() == std::vector({0, 0, 1}), "two hosts");
      context.output = cadre::format("{}", sum_over_ranks(*group));
      group->close(context.system.deadline_in(kRankTimeout));
    });
  };
  const SimulatedRanksResult first = run(5);
  EXPECT_EQ(first.failures(), "");
  EXPECT_EQ(first.ranks[2].output, "6");
  EXPECT_EQ(run(5).sim.history_hash, first.sim.history_hash);
  EXPECT_NE(run(6).sim.history_hash, first.sim.history_hash);
}

TEST(SimulatedRanks, FailIfAPlannedFaultDoesNotOccur) {
  const RankMain rank_main = [](RankContext& context) {
    const auto group = connect_ranks(context);
    static_cast<void>(sum_over_ranks(*group));
  };
  const auto kill = [](int64_t point) {
    return sim::SimOptions{.faults = {sim::Fault::kill(1, sim::When::at_point(1, point))}};
  };
  const SimulatedRanksResult whole = run_ranks_in_simulator(7, {}, 2, rank_main);
  EXPECT_EQ(whole.failures(), "");
  const int64_t num_points = whole.sim.ranks[1].num_points;
  EXPECT_EQ(run_ranks_in_simulator(7, kill(num_points / 2), 2, rank_main).failure, "");
  const SimulatedRanksResult missed = run_ranks_in_simulator(7, kill(1'000'000), 2, rank_main);
  EXPECT_FALSE(missed.ok());
  EXPECT_EQ(missed.failures(),
            cadre::format("a planned fault did not occur: kill rank 1 at point 1000000 of rank 1: "
                          "rank 1 ended after {} points; plan it earlier, for example at half of "
                          "sim.ranks[r].num_points or sim.ranks[r].at of a run without faults\n",
                          num_points));
}

// The error must be that of an invalid call, and not that of a failed check.
TEST(SimulatedRanks, RefuseOptionsWithAnotherNumberOfRanks) {
  EXPECT_EQ(failure_of([] {
              run_ranks_in_simulator(1, {.ranks_per_host = {2, 2}}, 3, [](RankContext&) {});
            }),
            "kInvalidArgument: run_ranks_in_simulator: SimOptions::ranks_per_host has 4 ranks in "
            "total, but world_size is 3; pass equal numbers");
}

TEST(ProcessRanks, ReturnOutputsAndFailuresByRank) {
  const Resources before = count_resources();
  const std::string large(200'000, 'x');  // larger than the buffer of a pipe
  const RanksResult result = run_ranks_as_processes(3, [&](RankContext& context) {
    require(context.rank != 1, "rank 1 does not want to");
    context.output = large + cadre::format("{} of {}", context.rank, context.world_size);
  });
  EXPECT_EQ(result.failures(), "rank 1: exception: check failed: rank 1 does not want to\n");
  EXPECT_EQ(result.ranks[0].output, large + "0 of 3");
  EXPECT_EQ(result.ranks[2].output, large + "2 of 3");
  EXPECT_EQ(leftovers_since(before), "");
}

TEST(ProcessRanks, ReportKilledAndLateRanks) {
  const Resources before = count_resources();
  const RanksResult result = run_ranks_as_processes(
      3,
      [](RankContext& context) {
        if (context.rank == 0) return;
        const auto waiter = context.system.make_waiter();
        waiter->park(context.system.deadline_in(seconds(60)));
      },
      {.time_limit = milliseconds(300),
       .disturb = [](std::span<const int> pids) { ::kill(pids[1], SIGKILL); }});
  EXPECT_EQ(result.failures(),
            "rank 1: killed by signal 9 (Killed)\n"
            "rank 2: had not ended after 300 ms and was killed\n");
  EXPECT_EQ(result.ranks[1].signal, SIGKILL);
  EXPECT_EQ(leftovers_since(before), "");
}

TEST(Leftovers, NameWhatIsHeld) {
  const Resources before = count_resources();
  const auto system = os::make_native_system();
  const auto event = system->make_event();
  const auto segment = system->create_segment(1).value_or_throw();
  const auto waiter = system->make_waiter();
  const auto thread =
      system->spawn("held", [&] { EXPECT_TRUE(waiter->park(system->deadline_in(seconds(60)))); });
  EXPECT_EQ(leftovers_since(before),
            "2 more descriptors; 1 more threads; 1 more mapped segments; ");
  waiter->unpark();
  thread->join();
}

// Lets all ranks connect to rank 0 at the rendezvous address, to check that rank 0 can listen
// there, with threads and with processes.
void greet_rank_zero(RankContext& context) {
  const Deadline deadline = context.system.deadline_in(seconds(10));
  if (context.rank == 0) {
    const auto listener = context.system.listen(context.rendezvous_address).value_or_throw();
    std::vector<std::unique_ptr<os::Socket>> sockets;
    while (sockets.size() + 1 < static_cast<size_t>(context.world_size)) {
      os::PollItem item{listener.get(), true};
      require(context.system.poll(std::span(&item, 1), deadline), "no rank connected");
      if (auto socket = listener->try_accept().value_or_throw()) {
        sockets.push_back(std::move(socket));
      }
    }
    return;
  }
  for (;;) {
    auto socket = context.system.connect(context.rendezvous_address, deadline);
    if (!socket.ok() && socket.error().code() == ErrorCode::kUnavailable) {
      context.system.make_waiter()->park(context.system.deadline_in(milliseconds(1)));
      continue;
    }
    std::move(socket).value_or_throw();
    return;
  }
}

TEST(ThreadRanks, MeetAtTheAddress) {
  EXPECT_EQ(run_ranks_as_threads(3, greet_rank_zero).failures(), "");
}

TEST(ProcessRanks, MeetAtTheAddress) {
  EXPECT_EQ(run_ranks_as_processes(3, greet_rank_zero).failures(), "");
}

}  // namespace
}  // namespace cadre::testing
