// Tests subgroups on threads that share one native System, over shared memory and over TCP.
#include "cadre/core/comm/groups/split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/flight/flight_record.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using testing::RankContext;
using testing::require;
using testing::run_ranks_as_threads;
using ::testing::UnorderedElementsAre;

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

// Returns the sum of the values over the ranks of a group.
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

// Five ranks are split by parity into {0, 2, 4} and {1, 3}. Both groups and the world are used
// alternately.
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
    require(group->membership().group.starts_with(group->id() + "@"),
            "survivors rejoin by a name that no other group has");
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
      // This group is split off from a subgroup.
      const auto alone = split(*pair, {.color = pair->rank()}, soon(context));
      require(alone->world_size() == 1 && sum(*alone, 5) == 5, "alone");
      pair->close(soon(context));
    }
  });
}

// The four ranks form a grid of 2 x 2. The groups of its rows and of its columns, and the groups of
// one rank that are split off the rows, have the same name. Another group has the name of the
// world. All of these groups exist at the same time.
TEST_P(Split, GroupsMayShareAName) {
  run_world(4, GetParam(), [this](RankContext& context, Communicator& world) {
    const int me = world.rank();
    const auto row = split(world, {.color = me / 2, .name = "line"}, soon(context));
    const auto column = split(world, {.color = me % 2, .name = "line"}, soon(context));
    const auto alone = split(*row, {.color = me % 2, .name = "line"}, soon(context));
    const auto all = split(world, {.color = 0, .name = "world"}, soon(context));
    for (int round = 0; round < 10; ++round) {
      require(sum(*row, me) == (me / 2 == 0 ? 1 : 5), "sum of the row");
      require(sum(*column, me) == (me % 2 == 0 ? 2 : 4), "sum of the column");
      require(sum(*alone, me) == me, "sum of one");
      require(sum(*all, me) == 6, "sum of all");
    }
    require(row->name() == "line" && alone->name() == "line", "the name that was given");
    require(row->id() == cadre::format("world/1.{}", me / 2), row->id());
    require(alone->id() == cadre::format("{}/1.{}", row->id(), me % 2), alone->id());
    for (const auto* group : {&alone, &column, &row, &all}) (*group)->close(soon(context));
  });
}

std::string name_of(const FlightRecord& record) {
  const FlightIdentity& who = record.identity;
  return cadre::format("{} {} rank {}", who.group, who.id, who.rank);
}

// Each group has a flight record of its own on each rank, although two groups have the same name.
TEST(SplitRecords, GroupsOfOneNameHaveRecordsOfTheirOwn) {
  const testing::TemporaryFolder folder;
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = run_ranks_as_threads(2, [&](RankContext& context) {
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    CommunicatorOptions options;
    options.flight_record_path = folder.file(cadre::format("world-rank{}.flight", context.rank));
    const Deadline deadline = context.system.deadline_in(kBudget);
    const auto world = Communicator::connect(context.system, membership, options, deadline);
    const auto half = split(*world, {.color = world->rank(), .name = "half"}, deadline);
    half->barrier();
    half->close(deadline);
    world->close(deadline);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const auto text = os::read_file(entry.path(), 1 << 20).value_or_throw();
    names.push_back(name_of(parse_flight_record(std::as_bytes(std::span(text))).value_or_throw()));
  }
  EXPECT_THAT(names, UnorderedElementsAre("world world rank 0", "world world rank 1",
                                          "half world/1.0 rank 0", "half world/1.1 rank 0"));
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
    EXPECT_EQ(
        refusal({0, 2}),
        format("new_group on group \"world\", rank {}: rank 2 of the list [0, 2] is not in the "
               "group of 2 ranks",
               context.rank));
    EXPECT_THAT(refusal({1, 1}), HasSubstr("rank 1 is in the list [1, 1] twice"));
    EXPECT_THAT(refusal({world.rank()}), HasSubstr("every rank must pass the same ranks"));
    const std::vector<Rank> both = {0, 1};
    const std::string own = world.rank() == 0 ? "pair" : "couple";
    EXPECT_EQ(refusal_of([&] { new_group(world, both, soon(context), own); }),
              format("new_group on group \"world\", rank {}: this rank names the group \"{}\", but "
                     "rank {} gives another name: every rank must pass the same name",
                     context.rank, own, 1 - world.rank().value));
    const auto named = new_group(world, both, soon(context), "pair");
    require(named->name() == "pair" && sum(*named, 1) == 2, named->name());
    named->close(soon(context));
    require(sum(world, 1) == 2, "the world goes on");
  });
}

// One of five ranks passes no colour, and the two ranks of colour 1 pass different names. All ranks
// throw the same error before the deadline, and the world stays usable.
TEST_P(Split, NamesThatDifferInOneColourAreRefusedOnAllRanks) {
  const std::string long_name = "a name that is longer than what travels of it";
  run_world(5, GetParam(), [&](RankContext& context, Communicator& world) {
    const int me = world.rank();
    const auto refusal = [&](const SplitOptions& options) {
      return refusal_of([&] { split(world, options, soon(context)); });
    };
    SplitOptions options{.color = me % 2, .name = me == 3 ? "odd" : "half"};
    if (me == 4) options = {.color = std::nullopt, .name = "none"};
    EXPECT_EQ(
        refusal(options),
        format("split on group \"world\", rank {}: rank 1 names the group of color 1 \"half\", "
               "rank 3 names it \"odd\": let all ranks of a color give one name",
               me));
    EXPECT_THAT(refusal({.color = 0, .name = long_name + (me == 4 ? "x" : "")}),
                HasSubstr("rank 4 names it \"a name that is longer than what ...\""));
    require(sum(world, 1) == 5, "the world goes on");
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

// A group of one rank needs no store, also in a world of one.
TEST_P(Split, AGroupOfOneOverAStoreNeedsNone) {
  for (const int world_size : {1, 3}) {
    run_world(world_size, GetParam(), [&](RankContext& context, Communicator& world) {
      const std::vector<Rank> list = {world.rank()};
      const auto alone =
          new_group_over_store(world, list, {.store = nullptr, .id = "alone"}, soon(context));
      require(alone->world_size() == 1 && alone->rank() == 0, "one rank");
      require(alone->global_ranks() == list, "this one");
      require(sum(*alone, world.rank() + 7) == world.rank() + 7, "its own value");
      alone->close(soon(context));
    });
  }
}

}  // namespace
}  // namespace cadre
