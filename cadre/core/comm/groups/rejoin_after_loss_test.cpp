// Tests groups of one job that are rebuilt at the same time, while processes of one group die and
// another group connects.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <string>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/rejoin_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/rendezvous/file_rendezvous.h"
#include "cadre/core/rendezvous/tcp_rendezvous.h"
#include "cadre/testing/core/process_ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankContext;
using testing::require;

// Rebuilds a subgroup after one of its ranks has failed.
std::unique_ptr<Communicator> rebuild_subgroup(RankContext& context,
                                               std::unique_ptr<Communicator> group,
                                               Deadline deadline) {
  const CommunicatorOptions options = group->options();
  const Membership membership = group->membership();
  group->abort("the test");
  (void)testing::failure_of([&] { group->close(deadline); });
  group.reset();
  const Membership next = rejoin(context.system, membership, {}, deadline).value_or_throw();
  group = Communicator::connect(context.system, next, options, deadline);
  group->barrier({.deadline = deadline});
  return group;
}

// Rank 2 of the job, which is rank 1 of the rebuilt subgroup {1, 2}, dies. Ranks 0 and 1 then
// rebuild the world in the same round, and rank 1 connects slowly. The dead rank 1 of the subgroup
// must not be confused with rank 1 of the world.
TEST(RejoinAfterLoss, ARankOfAnotherGroupThatDiedIsNotTakenForOneOfThisGroup) {
  const auto result = testing::run_ranks_as_processes(3, [](RankContext& context) {
    const Deadline deadline = context.system.deadline_in(seconds(20));
    const TcpRendezvousOptions options{.address = context.rendezvous_address,
                                       .rank = context.rank,
                                       .world_size = 3,
                                       .job_token = "token"};
    Membership membership = TcpRendezvous(context.system, options).join(deadline).value_or_throw();
    auto world = Communicator::connect(context.system, membership, {}, deadline);
    const std::array<Rank, 2> ranks = {1, 2};
    auto subgroup = new_group(*world, ranks, deadline);
    if (subgroup) subgroup = rebuild_subgroup(context, std::move(subgroup), deadline);
    if (context.rank == 2) ::kill(::getpid(), SIGKILL);
    require(!testing::failure_of([&] { world->barrier({.deadline = deadline}); }).empty(),
            "rank 2 is gone");
    const std::vector<Rank> lost = world->lost_ranks();
    require(lost.size() == 1 && lost[0] == 2, "and is known to be gone");
    (void)testing::failure_of([&] { world->close(deadline); });
    membership = rejoin(context.system, membership, lost, deadline).value_or_throw();
    if (context.rank == 1) {
      context.system.make_waiter()->park(context.system.deadline_in(milliseconds(1000)));
    }
    world = Communicator::connect(context.system, membership, {}, deadline);
    world->barrier({.deadline = deadline});
    require(world->world_size() == 2, "two are left");
    world->close(deadline);
  });
  EXPECT_EQ(result.ranks[0].failure, "");
  EXPECT_EQ(result.ranks[1].failure, "");
  EXPECT_EQ(result.ranks[2].signal, SIGKILL);
}

// Rank 0 dies, and the other ranks rejoin. With a TcpRendezvous its store ends, too; the store of a
// FileRendezvous stays.
std::string rejoin_without_rank_0(RankContext& context, Rendezvous& rendezvous) {
  const Deadline deadline = context.system.deadline_in(seconds(20));
  const Membership membership = rendezvous.join(deadline).value_or_throw();
  auto group = Communicator::connect(context.system, membership, {}, deadline);
  group->barrier({.deadline = deadline});
  if (context.rank == 0) ::kill(::getpid(), SIGKILL);
  (void)testing::failure_of([&] { group->barrier({.deadline = deadline}); });
  const std::string failure = testing::failure_of([&] {
    group = rejoin_group(*group, {.agreement = seconds(10), .connection = seconds(10)});
    require(group->world_size() == 2 && group->rank() == context.rank - 1, "two are left");
    group->barrier({.deadline = deadline});
  });
  if (failure.empty()) group->close(deadline);
  return failure;
}

TEST(RejoinAfterLoss, WithoutTheRankThatHostsTheStoreTheErrorSaysSo) {
  const auto result = testing::run_ranks_as_processes(3, [](RankContext& context) {
    TcpRendezvous rendezvous(context.system, {.address = context.rendezvous_address,
                                              .rank = context.rank,
                                              .world_size = 3,
                                              .job_token = "token"});
    const std::string failure = rejoin_without_rank_0(context, rendezvous);
    require(failure.starts_with("kPeerLost: rejoin: the ranks meet at the job's store, which has "
                                "ended with its process (the launcher, or rank 0 where none was "
                                "used); start the job anew from its last snapshot: "),
            failure);
  });
  EXPECT_EQ(result.ranks[1].failure, "");
  EXPECT_EQ(result.ranks[2].failure, "");
}

TEST(RejoinAfterLoss, AnyRankMayBeLostWhereTheStoreIsAFile) {
  const testing::TemporaryFolder folder;
  const auto result = testing::run_ranks_as_processes(3, [&](RankContext& context) {
    FileRendezvous rendezvous(context.system, {.path = folder.file("meeting"),
                                               .rank = context.rank,
                                               .world_size = 3,
                                               .job_token = "token"});
    const std::string failure = rejoin_without_rank_0(context, rendezvous);
    require(failure.empty(), failure);
  });
  EXPECT_EQ(result.ranks[1].failure, "");
  EXPECT_EQ(result.ranks[2].failure, "");
}

}  // namespace
}  // namespace cadre
