// Groups of one process that fail together (Communicator::fail_together): who hears of a failure
// when some ranks have closed some of the groups. On threads, over shared memory and over TCP.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/base/format.h"
#include "cadre/comm/communicator_impl.h"
#include "cadre/comm/failure/monitor.h"
#include "cadre/comm/groups/groups_test.h"
#include "cadre/comm/groups/split.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

Monitor& monitor_of(const Communicator& group) {
  return *CommunicatorParts::impl_of(group).monitor;
}

void await_that(RankContext& context, std::string_view what, const std::function<bool()>& is_met) {
  const Deadline deadline = context.system.deadline_in(seconds(10));
  while (!is_met()) {
    require(!deadline.has_passed(context.system.now()), format("waited for: {}", what));
    context.system.make_waiter()->park(context.system.deadline_in(milliseconds(1)));
  }
}

// A receive of what nobody sends: ends with the failure of the group.
std::string wait_in(Communicator& group, Rank from) {
  std::array<std::byte, 1> data{};
  return testing::failure_of([&] { group.recv(data, DType::kUint8, from, 7); });
}

// Ranks begin together by a barrier of a group that is linked with none: the failure may reach the
// others while they are still in that barrier.
class FailTogether : public GroupsTest {};

INSTANTIATE_TEST_SUITE_P(Transports, FailTogether,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         name_of_transport);

// Rank 2 has closed the world in good order and works on in the group of ranks 1 and 2, which is
// linked with the world. Rank 0 aborts the world, of which rank 2 hears in the group only.
TEST_P(FailTogether, AMemberThatClosedTheOneGroupHearsOfTheFailureInTheOther) {
  run(3, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const bool is_in = world.rank() != 0;
    const auto pair =
        split(world, {.color = is_in ? std::optional<int>(0) : std::nullopt, .name = "pair"},
              soon(context));
    if (is_in) world.fail_together(*pair);
    start->barrier();
    if (world.rank() == 0) {
      await_that(context, "the leave",
                 [&] { return monitor_of(world).peers()[2].left_after.has_value(); });
      world.abort("a test");
    } else {
      if (world.rank() == 2) world.close(soon(context));
      const TimePoint began = context.system.now();
      // Rank 1 computes before its barrier, until it hears of the failure.
      if (world.rank() == 1) {
        await_that(context, "the failure", [&] { return monitor_of(*pair).has_failed(); });
      }
      const std::string failure = testing::failure_of([&] { pair->barrier(); });
      const auto ms = (context.system.now() - began).count() / 1'000'000;
      require(failure.find("a test") != std::string::npos, format("after {} ms: {}", ms, failure));
    }
  });
}

// The group of ranks 0 and 1 is linked with the world. Rank 0 closes the world in good order and
// aborts the group, so it is rank 1 that tells rank 2, which waits for it in the world.
TEST_P(FailTogether, AReporterThatLeftTheLinkedGroupDoesNotKeepTheOthersWaiting) {
  run(3, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const bool is_in = world.rank() != 2;
    const auto pair =
        split(world, {.color = is_in ? std::optional<int>(0) : std::nullopt, .name = "pair"},
              soon(context));
    if (is_in) world.fail_together(*pair);
    start->barrier();
    if (world.rank() == 0) {
      world.close(soon(context));
      pair->abort("a test");
      await_that(context, "the failure", [&] { return monitor_of(*pair).has_failed(); });
    } else {
      const TimePoint began = context.system.now();
      const std::string failure = wait_in(world, 3 - world.rank().value);
      const auto ms = (context.system.now() - began).count() / 1'000'000;
      require(failure.find("a test") != std::string::npos, format("after {} ms: {}", ms, failure));
    }
  });
}

// Rank 1 leaves a group well and stays in the world. Rank 0 enters a collective of the group, which
// fails; rank 2 hears of that by the notice of rank 0.
TEST_P(FailTogether, ANoticeOfALeaveIsNoLossInTheLinkedGroup) {
  run(4, [](RankContext& context, Communicator& world) {
    const auto start = split(world, {.color = 0, .name = "start"}, soon(context));
    const bool is_in = world.rank() != 3;
    const auto group =
        split(world, {.color = is_in ? std::optional<int>(0) : std::nullopt, .name = "small"},
              soon(context));
    if (is_in) world.fail_together(*group);
    start->barrier();
    if (world.rank() == 1) group->close(soon(context));
    if (world.rank() == 0) testing::failure_of([&] { group->barrier(); });
    await_that(context, "the failure", [&] { return monitor_of(world).has_failed(); });
    const std::string fields = testing::failed_fields_of([&] { world.barrier(); });
    require(fields.find("kAborted") == 0, format("rank 1 is alive and in the world: {}; {}", fields,
                                                 testing::failure_of([&] { world.barrier(); })));
  });
}

// As MeshGroups links them: the groups with the world, which is closed first. Rank 0 hears of the
// abort in its row, and leaves; rank 2 waits for it in their column.
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
    require(failure.find("a test") != std::string::npos, failure);
  });
}

// A group that was closed in good order on all ranks.
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

// As Parting.NoMonitorIsKeptOfAGroupThatFailedAroundItsClose, but the group fails by its link.
TEST_P(FailTogether, NoMonitorIsKeptOfAClosedGroupThatFailedByItsLink) {
  run(2, [](RankContext& context, Communicator& world) {
    const auto pair = split(world, {.color = 0, .name = "pair"}, soon(context));
    const auto other = split(world, {.color = 0, .name = "other"}, soon(context));
    pair->fail_together(*other);
    const GroupKey key = CommunicatorParts::impl_of(*pair).key;
    world.barrier();
    if (world.rank() == 0) pair->close(soon(context));
    world.barrier();
    if (world.rank() == 1) other->abort("a test");
    await_that(context, "the failure", [&] { return monitor_of(*other).has_failed(); });
    pair->close(soon(context));
    other->close(soon(context));
    world.barrier();
    const ControlPlane& plane = *CommunicatorParts::impl_of(world).fabric->plane();
    await_that(context, "the plane to let go of the monitor",
               [&] { return !plane.is_attached(key); });
    world.barrier();
  });
}

// As Parting.ALeaveDuringACollectiveThatSucceedsIsReportedAndNothingIsKept, with a linked group.
TEST(FailTogetherParting, ALeaveDuringACollectiveThatSucceedsIsReportedInALinkedGroup) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    const auto soon = [&] { return context.system.deadline_in(seconds(20)); };
    CommunicatorOptions options;
    options.transport = TransportChoice::kTcp;
    const auto world = Communicator::connect(context.system, {context.rank, 2, 1, store, "token"},
                                             options, soon());
    const auto side = split(*world, {.color = 0, .name = "side"}, soon());
    const auto group = split(*world, {.color = 0, .name = "group"}, soon());
    group->fail_together(*side);
    std::array<float, 4> data{};
    group->broadcast(std::as_writable_bytes(std::span(data)), DType::kFloat32, 0);
    world->barrier();
    if (context.rank == 0) group->close(soon());
    if (context.rank == 1) {
      Monitor& monitor = monitor_of(*group);
      const Fingerprint call =
          OpDescriptor{OpKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, 1, 4}.fingerprint();
      ActivityCell& cell = monitor.own_cell().collective;
      cell.begin(2, call, context.system.now());
      monitor.enter_collective(2);
      await_that(context, "the failure", [&] { return monitor.has_failed(); });
      cell.end(true, context.system.now());
      monitor.leave_collective();
      monitor.publish_leave(2, soon());
      const auto late = CommunicatorParts::impl_of(*group).fabric->late_errors()->take();
      require(late.has_value(), "the mismatch was not reported");
    }
    world->barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
