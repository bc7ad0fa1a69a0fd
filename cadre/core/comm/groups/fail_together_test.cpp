// Tests groups of one process that fail together (Communicator::fail_together): which ranks learn
// of a failure if some ranks have closed some of the groups. Ranks are threads, over shared memory
// and TCP.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <optional>
#include <string>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/thread_groups.h"

namespace cadre {
namespace {

// Waits for a message that no rank sends, and returns the failure of the group.
std::string wait_in(Communicator& group, Rank from) {
  std::array<std::byte, 1> data{};
  return testing::failure_of([&] { group.recv(data, DType::kUint8, from, 7); });
}

// The ranks synchronize with a barrier of a group that is not linked with any other, because a
// failure could reach a linked group while some ranks are still in the barrier.
class FailTogether : public GroupsTest {
 protected:
  // Returns a group of all ranks but `outsider`, linked with the world. Returns null on `outsider`.
  static std::unique_ptr<Communicator> linked_without(Rank outsider, RankContext& context,
                                                      Communicator& world) {
    const auto color = world.rank() == outsider ? std::nullopt : std::optional<int>(0);
    auto group = split(world, {.color = color, .name = "without"}, soon(context));
    if (group != nullptr) world.fail_together(*group);
    return group;
  }
  static void require_first_failure(const std::string& failure) {
    require(failure.find("abort() was called: a test") != std::string::npos, failure);
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, FailTogether,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         name_of_transport);

// Rank 2 has closed the world in an orderly way and continues in the group of ranks 1 and 2, which
// is linked with the world. Rank 0 aborts the world. Rank 2 can learn of that only in the group.
TEST_P(FailTogether, AMemberThatClosedTheOneGroupHearsOfTheFailureInTheOther) {
  run(3, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const auto pair = linked_without(0, context, world);
    start->barrier();
    if (world.rank() == 0) {
      await_leave(context, world, 2);
      world.abort("a test");
    } else {
      if (world.rank() == 2) world.close(soon(context));
      // Rank 1 calls its barrier only after it has learned of the failure.
      if (world.rank() == 1) {
        await(context, "the failure", [&] { return monitor_of(*pair).has_failed(); });
      }
      const std::string failure = testing::failure_of([&] { pair->barrier(); });
      require_first_failure(failure);
    }
  });
}

// The group of ranks 0 and 1 is linked with the world. Rank 0 closes the world in an orderly way
// and aborts the group. So rank 1 must publish the failure to rank 2, which waits for rank 1 in the
// world.
TEST_P(FailTogether, AReporterThatLeftTheLinkedGroupDoesNotKeepTheOthersWaiting) {
  run(3, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const auto pair = linked_without(2, context, world);
    start->barrier();
    if (world.rank() == 0) {
      world.close(soon(context));
      pair->abort("a test");
      await(context, "the failure", [&] { return monitor_of(*pair).has_failed(); });
    } else {
      const std::string failure = wait_in(world, 3 - world.rank().value);
      require_first_failure(failure);
    }
  });
}

// Rank 1 leaves the group in an orderly way and stays in the world. Rank 0 then enters a collective
// of the group, which fails. Rank 2 learns of that failure from the notice of rank 0. In the world
// the failure must not count as the loss of rank 1.
TEST_P(FailTogether, ANoticeOfALeaveIsNoLossInTheLinkedGroup) {
  run(4, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const auto group = linked_without(3, context, world);
    start->barrier();
    if (world.rank() == 1) group->close(soon(context));
    if (world.rank() == 0) testing::failure_of([&] { group->barrier(); });
    await(context, "the failure", [&] { return monitor_of(world).has_failed(); });
    const std::string fields = testing::failed_fields_of([&] { world.barrier(); });
    require(fields.find("kAborted") == 0, format("rank 1 is alive and in the world: {}; {}", fields,
                                                 testing::failure_of([&] { world.barrier(); })));
  });
}

// The groups are linked as those of a mesh: each with the world, which is closed first. Rank 0
// learns of the abort in its row, and leaves. Rank 2, which waits for rank 0 in their column, must
// learn of it, too.
TEST_P(FailTogether, TheGroupsOfAMeshFailTogetherAfterTheWorldWasClosed) {
  run(4, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const auto row = split(world, {.color = world.rank() / 2, .name = "row"}, soon(context));
    const auto column = split(world, {.color = world.rank() % 2, .name = "column"}, soon(context));
    world.fail_together(*row);
    world.fail_together(*column);
    start->barrier();
    world.close(soon(context));
    if (world.rank() == 1) row->abort("a test");
    const std::string failure = testing::failure_of([&] {
      while (true) (world.rank() >= 2 ? column : row)->barrier();
    });
    column->close(soon(context));
    row->close(soon(context));
    require_first_failure(failure);
  });
}

// All ranks have closed the group in an orderly way, so its later abort must not fail the world,
// which is linked with it.
TEST_P(FailTogether, AnAbortOfAClosedGroupLeavesTheLinkedOneAtWork) {
  run(2, [](RankContext& context, Communicator& world) {
    const auto first = split(world, {.color = 0, .name = "first"}, soon(context));
    const auto second = split(world, {.color = 0, .name = "second"}, soon(context));
    first->fail_together(*second);
    world.barrier();
    first->close(soon(context));
    world.barrier();
    if (world.rank() == 0) first->abort("after the end");
    world.barrier();
    second->barrier();
    second->close(soon(context));
  });
}

// A group fails through its link after rank 0, and before rank 1, has closed it. No process may
// keep its monitor, as in Parting.NoMonitorIsKeptOfAGroupThatFailedAroundItsClose.
TEST_P(FailTogether, NoMonitorIsKeptOfAClosedGroupThatFailedByItsLink) {
  run(2, [](RankContext& context, Communicator& world) {
    const auto pair = split(world, {.color = 0, .name = "pair"}, soon(context));
    const auto other = split(world, {.color = 0, .name = "other"}, soon(context));
    pair->fail_together(*other);
    const GroupKey key = CommunicatorParts::impl_of(*pair).identity.key();
    world.barrier();
    if (world.rank() == 0) pair->close(soon(context));
    world.barrier();
    if (world.rank() == 1) other->abort("a test");
    await(context, "the failure", [&] { return monitor_of(*other).has_failed(); });
    pair->close(soon(context));
    other->close(soon(context));
    world.barrier();
    const ControlPlane& plane = *CommunicatorParts::impl_of(world).fabric->plane();
    await(context, "the plane to let go of the monitor", [&] { return !plane.is_attached(key); });
    world.barrier();
  });
}

}  // namespace
}  // namespace cadre
