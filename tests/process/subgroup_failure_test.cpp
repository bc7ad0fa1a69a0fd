// Tests a rank that is killed inside a subgroup: the errors of that subgroup and of the world, and
// that the subgroup of the other ranks still works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::JobOptions;
using testing::mask;
using testing::RankContext;
using testing::require;
using ::testing::StartsWith;

constexpr int kWorldSize = 4;
// The victim's rank in the world. It is rank 1 of the half with the odd ranks.
constexpr int kVictim = 3;
constexpr int kPartner = 1;
// The timeout of every operation. A loss must be reported in a much shorter time, kLimit.
constexpr Duration kTimeout = seconds(20);
constexpr Duration kLimit = seconds(5);

int64_t sum(Communicator& group, int64_t mine) {
  int64_t total = 0;
  group.all_reduce(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(&total, 1)),
                   DType::kInt64, ReduceOp::kSum);
  return total;
}

// Runs operations of the half without the victim, which must work both before and after the world
// has failed.
void work_on(Communicator& half, int rank) {
  for (int step = 0; step < 100; ++step)
    require(sum(half, rank) == 0 + 2, "wrong sum of the even ranks");
}

// Waits until every rank has created its half: if the victim died during the creation, the creation
// would fail instead of the operation under test.
void await_creation(RankContext& context, Store& store) {
  store.barrier("created", kWorldSize, context.system.deadline_in(kTimeout)).value_or_throw();
}

// Returns the error of the rank's half, if the half has failed, followed by the error of the world.
void live_through(RankContext& context, const Membership& membership, TransportChoice transport) {
  const testing::Resources before = testing::count_resources();
  const int me = context.rank;
  {
    const auto world =
        testing::connect(context, membership, {.timeout = kTimeout, .transport = transport});
    const int victim_pid = world->peers()[kVictim].pid;
    const auto half =
        split(*world, {.color = me % 2, .name = "half"}, context.system.deadline_in(kTimeout));
    require(sum(*half, me) == (me % 2 == 0 ? 2 : 4), "wrong sum of the half");
    await_creation(context, *membership.store);
    if (me == kVictim) ::raise(SIGKILL);
    const TimePoint begin = context.system.now();
    if (me == kPartner) {
      context.output = testing::failure_of([&] { sum(*half, me); }) + "\f";
    } else {
      work_on(*half, me);
    }
    context.output += testing::failure_of([&] { world->barrier(); });
    require(context.system.now() - begin < kLimit, "the error came too late");
    require(context.output.find(format("pid {}) is gone", victim_pid)) != std::string::npos,
            context.output);
    const std::vector<Rank> lost = world->lost_ranks();
    require(lost.size() == 1 && lost[0] == kVictim, "the world must list only the victim as lost");
    if (me != kPartner) work_on(*half, me);
    half->close(context.system.deadline_in(seconds(5)));
    world->close(context.system.deadline_in(seconds(5)));
  }
  const std::string left = testing::leftovers_since(before);
  require(left.empty(), left);
}

// A rank that notices the failure between two operations throws a different text.
auto names_victim(const std::string& operation, const std::string& group, const std::string& victim,
                  const std::string& self) {
  const auto gone = HasSubstr(format("\n  {} is gone: its connection ended, last seen ", victim));
  return AllOf(
      gone, AnyOf(StartsWith(format("kPeerLost: {} #N on group \"{}\" failed after N s on {}",
                                    operation, group, self)),
                  StartsWith(format("kPeerLost: group \"{}\" failed on {} after ", group, self))));
}

std::string of_world(int rank) {
  return format("rank {} (HOST, pid N)", rank);
}

std::string of_half(int rank, int world_rank) {
  return format("rank {} of group \"half\" (world rank {}, HOST, pid N)", rank, world_rank);
}

class SubgroupFailure : public ::testing::TestWithParam<TransportChoice> {};

INSTANTIATE_TEST_SUITE_P(Transports, SubgroupFailure,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         [](const auto& test) {
                           return test.param == TransportChoice::kTcp ? "tcp" : "host";
                         });

TEST_P(SubgroupFailure, ItsGroupAndTheWorldNameTheVictimAndTheOtherHalfWorksOn) {
  const testing::Resources before = testing::count_resources();
  const auto result = testing::run_job({.world_size = kWorldSize},
                                       [&](RankContext& context, const Membership& membership) {
                                         live_through(context, membership, GetParam());
                                       });
  EXPECT_EQ(result.ranks[kVictim].signal, SIGKILL);
  for (const int rank : {0, 1, 2}) {
    const auto& outcome = result.ranks[static_cast<size_t>(rank)];
    ASSERT_EQ(outcome.failure, "") << "rank " << rank;
    std::string said = mask(outcome.output);
    if (rank == kPartner) {
      const size_t end = said.find('\f');
      EXPECT_THAT(said.substr(0, end),
                  names_victim("all_reduce", "half", of_half(1, kVictim), of_half(0, kPartner)));
      said.erase(0, end + 1);
    }
    EXPECT_THAT(said, names_victim("barrier", "world", of_world(kVictim), of_world(rank)));
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

}  // namespace
}  // namespace cadre
