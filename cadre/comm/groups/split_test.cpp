// Subgroups on threads that share one native System, over shared memory and over TCP.
#include "cadre/comm/groups/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "cadre/base/format.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/leftovers.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using testing::RankContext;
using testing::require;
using testing::run_ranks_as_threads;

constexpr Duration kBudget = std::chrono::seconds(20);

using Body = std::function<void(RankContext&, Communicator&)>;

void run_world(int world_size, TransportChoice transport, const Body& body) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = run_ranks_as_threads(world_size, [&](RankContext& context) {
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    CommunicatorOptions options;
    options.transport = transport;
    const Deadline deadline = context.system.deadline_in(kBudget);
    const auto world = Communicator::connect(context.system, membership, options, deadline);
    body(context, *world);
    world->close(context.system.deadline_in(kBudget));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The sum over a group's ranks of what each brings.
int64_t sum(Communicator& group, int64_t mine) {
  int64_t total = 0;
  group.all_reduce(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(&total, 1)),
                   DType::kInt64, ReduceOp::kSum);
  return total;
}

class Split : public ::testing::TestWithParam<TransportChoice> {
 protected:
  Deadline soon(RankContext& context) { return context.system.deadline_in(kBudget); }
};

INSTANTIATE_TEST_SUITE_P(Transports, Split,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         [](const auto& test) {
                           return test.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
                         });

// Five ranks by parity: {0, 2, 4} and {1, 3}; both groups and the world at work in turns.
TEST_P(Split, GroupsOfOneColourSumAmongThemselves) {
  run_world(5, GetParam(), [this](RankContext& context, Communicator& world) {
    const int me = world.rank();
    const auto group = split(world, {.color = me % 2}, soon(context));
    require(group->world_size() == (me % 2 == 0 ? 3 : 2), "size");
    require(group->rank() == me / 2, "rank");
    for (int round = 0; round < 20; ++round) {
      require(sum(*group, me) == (me % 2 == 0 ? 6 : 4), "sum of the group");
      require(sum(world, me) == 10, "sum of the world");
    }
    require(group->name() == cadre::format("world/1.{}", me % 2), group->name());
    group->close(soon(context));
  });
}

TEST_P(Split, KeysOrderTheRanks) {
  run_world(3, GetParam(), [this](RankContext& context, Communicator& world) {
    const auto group = split(world, {.color = 0, .key = -world.rank()}, soon(context));
    require(group->rank() == 2 - world.rank(), "reversed");
    int64_t value = group->rank() == 0 ? world.rank().value : -1;
    group->broadcast(std::as_writable_bytes(std::span(&value, 1)), DType::kInt64, 0);
    require(value == 2, "the world's rank 2 is the group's rank 0");
    group->close(soon(context));
  });
}

TEST_P(Split, ARankWithoutColourIsInNone) {
  run_world(3, GetParam(), [this](RankContext& context, Communicator& world) {
    const bool is_in = world.rank() != 1;
    SplitOptions options;
    if (is_in) options.color = 7;
    const auto group = split(world, options, soon(context));
    require((group != nullptr) == is_in, "membership");
    if (group) require(sum(*group, world.rank()) == 2, "sum");
    if (group) group->close(soon(context));
    require(sum(world, 1) == 3, "the world goes on");
  });
}

TEST_P(Split, ANewGroupHasTheListsOrderAndMayHaveOneRank) {
  run_world(4, GetParam(), [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {3, 1};
    const auto pair = new_group(world, list, soon(context));
    require((pair != nullptr) == (world.rank() % 2 == 1), "membership");
    if (pair) {
      require(pair->rank() == (world.rank() == 3 ? 0 : 1), "order");
      require(sum(*pair, world.rank()) == 4, "sum");
      // Groups of groups.
      const auto alone = split(*pair, {.color = pair->rank()}, soon(context));
      require(alone->world_size() == 1 && sum(*alone, 5) == 5, "alone");
      pair->close(soon(context));
    }
  });
}

TEST_P(Split, TheGroupOutlivesItsParent) {
  run_world(2, GetParam(), [this](RankContext& context, Communicator& world) {
    const auto group = split(world, {.color = 0}, soon(context));
    world.close(soon(context));
    require(sum(*group, 1) == 2, "sum");
    group->close(soon(context));
  });
}

std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "";
}

TEST_P(Split, ListsThatDifferOrMakeNoSenseAreRefused) {
  run_world(2, GetParam(), [this](RankContext& context, Communicator& world) {
    const auto refusal = [&](std::vector<Rank> list) {
      return refusal_of([&] { new_group(world, list, soon(context)); });
    };
    EXPECT_THAT(refusal({}), HasSubstr("is empty"));
    EXPECT_THAT(refusal({0, 2}), HasSubstr("rank 2 is not in the group of 2 ranks"));
    EXPECT_THAT(refusal({1, 1}), HasSubstr("rank 1 is in the list twice"));
    EXPECT_THAT(refusal({world.rank()}), HasSubstr("every rank must name the same ranks"));
    require(sum(world, 1) == 2, "the world goes on");
  });
}

TEST_P(Split, LeavesNothingBehind) {
  const testing::Resources before = testing::count_resources();
  run_world(3, GetParam(), [this](RankContext& context, Communicator& world) {
    for (int i = 0; i < 5; ++i) {
      const auto group = split(world, {.color = world.rank() == i % 3 ? 1 : 0}, soon(context));
      group->close(soon(context));
    }
  });
  EXPECT_EQ(testing::leftovers_since(before), "");
}

}  // namespace
}  // namespace cadre
