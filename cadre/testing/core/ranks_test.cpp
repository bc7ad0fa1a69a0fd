#include "cadre/testing/core/ranks.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <array>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/leftovers.h"

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
  EXPECT_EQ(result.failures(), "rank 1: kInternal: rank 1 does not want to\n");
  EXPECT_EQ(result.ranks[0].output, "0 of 3");
  EXPECT_EQ(result.ranks[2].output, "2 of 3");
  EXPECT_EQ(leftovers_since(before), "");
}

TEST(ProcessRanks, ReturnOutputsAndFailuresByRank) {
  const Resources before = count_resources();
  const std::string large(200'000, 'x');  // larger than the buffer of a pipe
  const RanksResult result = run_ranks_as_processes(3, [&](RankContext& context) {
    require(context.rank != 1, "rank 1 does not want to");
    context.output = large + cadre::format("{} of {}", context.rank, context.world_size);
  });
  EXPECT_EQ(result.failures(), "rank 1: kInternal: rank 1 does not want to\n");
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

// Checks that rank 0 can listen at the rendezvous address, whether ranks are threads or processes.
void greet_rank_zero(RankContext& context) {
  const Deadline deadline = context.system.deadline_in(seconds(10));
  if (context.rank == 0) {
    const auto listener = context.system.listen(context.rendezvous_address).value_or_throw();
    std::vector<std::unique_ptr<os::Socket>> sockets;
    while (sockets.size() + 1 < static_cast<size_t>(context.world_size)) {
      os::PollItem item{listener.get(), true};
      require(context.system.poll(std::span(&item, 1), deadline), "nobody came");
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
