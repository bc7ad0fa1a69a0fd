// Tests that no two groups have the same identity, even if their ids are equal. Tests the type
// itself, and groups of two rounds of one job, whose ranks are threads, over shared memory and over
// TCP.
#include "cadre/core/fabric/group_identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/thread_groups.h"

namespace cadre {
namespace {

TEST(GroupIdentity, GroupsOfOneIdHaveKeysOfTheirOwn) {
  const std::array<int, 2> pair = {0, 1};
  const std::array<int, 2> other_pair = {0, 2};
  const std::array<uint64_t, 2> stamps = {5, 6};
  const std::array<uint64_t, 2> other_stamps = {6, 5};
  const auto world = GroupIdentity::of_connection("world", 77);
  const auto next_world = GroupIdentity::of_connection("world", 78);
  const auto creation = GroupIdentity::of_creation("world/2.0", 77, pair);
  const std::vector<GroupIdentity> all = {
      world,
      next_world,
      world.child(2, 0),
      next_world.child(2, 0),
      world.child(2),
      world.child(2, 1),
      world.child(3, 0),
      creation,
      GroupIdentity::of_creation("world/2.0", 78, pair),
      GroupIdentity::of_creation("world/2.0", 77, other_pair),
      creation.created(stamps),
      creation.created(other_stamps),
      creation.created(stamps).child(2, 0),
      GroupIdentity::of_connection("world/2.0", 77),
  };
  std::set<GroupKey> keys;
  std::set<std::string> names;
  std::set<std::string> files;
  for (const GroupIdentity& one : all) {
    keys.insert(one.key());
    names.insert(one.unique_name());
    files.insert(one.file_name("name"));
    EXPECT_EQ(one.stream(1), (StreamId{one.key(), 1}));
  }
  EXPECT_EQ(keys.size(), all.size());
  EXPECT_EQ(names.size(), all.size());
  EXPECT_EQ(files.size(), all.size());
  EXPECT_EQ(world.child(2, 0).id(), "world/2.0");
  EXPECT_EQ(world.child(2).id(), "world/2");
  EXPECT_EQ(creation.created(stamps).id(), "world/2.0");
  EXPECT_EQ(GroupIdentity::of_connection("world", 77), world) << "equal on all ranks";
}

TEST(GroupIdentity, ManyGroupsOfOneParentHaveKeysOfTheirOwn) {
  const auto world = GroupIdentity::of_connection("world", 77);
  std::set<GroupKey> keys;
  for (uint64_t number = 1; number <= 2000; ++number) {
    for (int color = 0; color < 50; ++color) keys.insert(world.child(number, color).key());
  }
  EXPECT_EQ(keys.size(), 100'000u);
}

TEST(GroupIdentity, NamesOfFilesAreSafe) {
  const std::string name =
      GroupIdentity::of_connection("x", 1).file_name("../a b\n" + std::string(300, 'c'));
  EXPECT_TRUE(name.starts_with("...a.b.ccc")) << name;
  EXPECT_EQ(name.size(), 100u + 17u);
  EXPECT_EQ(name.find_first_of("/ \n+"), std::string::npos);
}

TEST(GroupIdentity, AMembershipKeepsItsNameThroughRounds) {
  EXPECT_EQ(connection_name("world", "world"), "world");
  EXPECT_EQ(connection_name("world/2.0@00ff", "world/2.0"), "world/2.0@00ff");
  const std::string other = connection_name("world", "trainers");
  EXPECT_THAT(other, ::testing::StartsWith("trainers@"));
  EXPECT_EQ(connection_name(other, "trainers"), other);
  EXPECT_NE(connection_name("trainers", "world"), other);
}

class GroupsOfRounds : public GroupsTest {
 protected:
  static int64_t sum_over(Communicator& group, int64_t value) {
    std::vector<int64_t> values(1000, value);
    group.all_reduce(bytes_of(values), bytes_of(values), DType::kInt64, ReduceOp::kSum);
    require(values.front() == values.back(), "all elements");
    return values.front();
  }

  // Waits until all three ranks have called this, so that earlier operations have ended on each of
  // them.
  void meet(RankContext& context, const std::string& place) {
    store_->add(place, 1, soon(context)).value_or_throw();
    await(context, place,
          [&] { return store_->add(place, 0, soon(context)).value_or_throw() == 3; });
  }

  static std::unique_ptr<Communicator> rebuild(RankContext& context,
                                               std::unique_ptr<Communicator> group) {
    const CommunicatorOptions options = group->options();
    const Membership membership = group->membership();
    group->abort("the test");
    static_cast<void>(testing::failure_of([&] { group->barrier(); }));
    static_cast<void>(testing::failure_of([&] { group->close(soon(context)); }));
    group.reset();
    const Membership next = rejoin(context.system, membership, {}, soon(context)).value_or_throw();
    return Communicator::connect(context.system, next, options, soon(context));
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, GroupsOfRounds,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         name_of_transport);

// The first operation of the first world splits off {0, 1}, which is then rejoined. Then the world
// is rejoined, and its first operation splits off {0, 2}. Both subgroups now belong to round 2 and
// have the id "world/1.0". Finally both are rejoined.
TEST_P(GroupsOfRounds, ARejoinedSubgroupAndOneOfTheRejoinedWorldStayApart) {
  const auto result = testing::run_ranks_as_threads(3, [&](RankContext& context) {
    const int me = context.rank.value;
    CommunicatorOptions options;
    options.transport = GetParam();
    options.timeout = kGroupsBudget;
    auto world = Communicator::connect(context.system, {context.rank, 3, 1, store_, "token"},
                                       options, soon(context));
    const auto color = [](bool is_member) { return is_member ? std::optional(0) : std::nullopt; };
    auto first = split(*world, {.color = color(me != 2)}, soon(context));
    meet(context, "first split");
    if (first) first = rebuild(context, std::move(first));
    world = rebuild(context, std::move(world));
    auto second = split(*world, {.color = color(me != 1)}, soon(context));
    const int64_t value = int64_t{1} << (4 * me);
    if (first) require(first->id() == "world/1.0", first->id());
    if (second) require(second->id() == "world/1.0", second->id());
    meet(context, "second split");
    if (first) first = rebuild(context, std::move(first));
    if (second) second = rebuild(context, std::move(second));
    if (first) {
      require(first->world_size() == 2, "the first group has two ranks");
      require(sum_over(*first, value) == 0x011, "the sum of ranks 0 and 1");
    }
    if (second) {
      require(second->world_size() == 2, "the second group has two ranks");
      require(sum_over(*second, value) == 0x101, "the sum of ranks 0 and 2");
    }
    require(sum_over(*world, value) == 0x111, "the sum of all ranks");
    for (auto* group : {first.get(), second.get(), world.get()}) {
      if (group != nullptr) group->close(soon(context));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
