// Tests ranks whose last collectives differ although each of these collectives has succeeded,
// because over TCP the rank only sent data. close() must report the mismatch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/thread_groups.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::RankContext;

constexpr Duration kLimit = seconds(20);
constexpr std::array<Rank, 2> kBoth = {0, 1};
constexpr const char* kPair = "world/1";

Deadline parting_deadline(RankContext& context) {
  return context.system.deadline_in(kLimit);
}

void broadcast(Communicator& group, Rank root) {
  std::array<float, 4> data{};
  group.broadcast(std::as_writable_bytes(std::span(data)), DType::kFloat32, root);
}

// Runs ranks over TCP. Returns the error of each rank in `body`, or when it closed the world
// afterwards.
std::vector<std::string> outputs_of(const std::function<void(RankContext&, Communicator&)>& body,
                                    int num_ranks = 2) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = testing::run_ranks_as_threads(num_ranks, [&](RankContext& context) {
    CommunicatorOptions options;
    options.transport = TransportChoice::kTcp;
    options.timeout = kLimit;
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    const auto world =
        Communicator::connect(context.system, membership, options, parting_deadline(context));
    context.output = testing::failure_of([&] {
      body(context, *world);
      world->close(parting_deadline(context));
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  std::vector<std::string> outputs;
  for (const auto& rank : result.ranks) outputs.push_back(rank.output);
  return outputs;
}

::testing::Matcher<std::string> names_both(const std::string& group, int number = 1) {
  const auto called = [number](int rank) {
    return HasSubstr(format(") called broadcast(float32 x 4, root {}) as #{}", rank, number));
  };
  return ::testing::AllOf(HasSubstr("group \"" + group + "\" failed on rank "),
                          HasSubstr("the ranks disagree: rank 0 ("), HasSubstr(", rank 1 ("),
                          called(0), called(1));
}

// A barrier of two ranks that uses messages, which are numbered separately from collectives.
void meet(RankContext& context, Communicator& group) {
  const Rank other = 1 - context.rank;
  std::array<std::byte, 1> sent{};
  std::array<std::byte, 1> received{};
  Work sending = group.send_async(sent, DType::kUint8, other, 0);
  group.recv(received, DType::kUint8, other, 0);
  sending.wait();
}

TEST(Parting, BroadcastsWithDifferentRootsAreReportedWhenTheWorldCloses) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    // The barrier connects the ranks before the broadcast. A rank that connects during the
    // broadcast would receive a header of the other rank, and could detect the mismatch there.
    world.barrier();
    broadcast(world, context.rank);
    meet(context, world);
  });
  // Only one error is required, because the rank that leaves first does not know the last call of
  // the other rank yet.
  EXPECT_THAT(outputs, ::testing::Contains(names_both("world", 2)));
  EXPECT_THAT(outputs, ::testing::Each(::testing::AnyOf("", names_both("world", 2))));
}

TEST(Parting, AMismatchInAClosedGroupIsReportedOnceAtTheLatestWhenTheWorldCloses) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, parting_deadline(context));
    broadcast(*pair, context.rank);
    if (context.rank == 0) pair->close(parting_deadline(context));
    world.barrier();
    const std::string told = testing::failure_of([&] { pair->close(parting_deadline(context)); });
    world.barrier();
    if (told.empty()) return;
    EXPECT_EQ(context.rank, 1);
    EXPECT_EQ(testing::failure_of([&] { world.close(parting_deadline(context)); }), "");
    throw std::runtime_error(told);
  });
  EXPECT_THAT(outputs, ::testing::Each(names_both(kPair)));
}

TEST(Parting, ABroadcastThatOnlyOneRankCalledIsReported) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    world.barrier();
    if (context.rank == 1) broadcast(world, 1);
  });
  EXPECT_THAT(outputs, ::testing::Contains(::testing::AnyOf(
                           HasSubstr("left the group after #1 (it ended its loop early?)"))));
}

// A cell of the status page is reused after 128 groups. It must not show the last call of the
// previous group.
TEST(Parting, GroupsWithoutACollectiveAgreeInReusedStatusCells) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    for (int i = 0; i < 130; ++i) {
      const auto alone = split(world, {.color = context.rank}, parting_deadline(context));
      if (context.rank == 0) alone->barrier();
      if (context.rank == 1) broadcast(*alone, 0);
    }
    for (int i = 0; i < 4; ++i) {
      new_group(world, kBoth, parting_deadline(context))->close(parting_deadline(context));
      world.barrier();
    }
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

// Calls of the group throw its failure, so close() reports no mismatch in addition.
TEST(Parting, NoMismatchIsReportedInAFailedGroup) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, parting_deadline(context));
    broadcast(*pair, 0);
    if (context.rank == 1) {
      broadcast(*pair, 1);
      pair->close(parting_deadline(context));
    }
    if (context.rank == 0) {
      await_leave(context, *pair, 1);
      pair->abort("the program gave up");
    }
    pair->close(parting_deadline(context));
    world.barrier();
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

// A mismatch is reported although an earlier group has failed: that failure does not explain a
// mismatch in a group that was made after it.
TEST(Parting, AMismatchAfterTheFailureOfAnEarlierGroupIsReported) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto failed = new_group(world, kBoth, parting_deadline(context));
    failed->abort("the program gave up");
    failed->close(parting_deadline(context));
    const auto pair = new_group(world, kBoth, parting_deadline(context));
    broadcast(*pair, context.rank);
    meet(context, world);
    pair->close(parting_deadline(context));
  });
  EXPECT_THAT(outputs, ::testing::Contains(names_both("world/2")));
  EXPECT_THAT(outputs, ::testing::Each(::testing::AnyOf("", names_both("world/2"))));
}

// The second collective of this rank succeeds. Meanwhile the leave of rank 0 arrives, and the group
// fails. Returns the error that is reported when this rank leaves, too.
std::optional<Error> error_after_a_leave_beside_a_collective(RankContext& context,
                                                             const Communicator& group) {
  Monitor& monitor = monitor_of(group);
  const Fingerprint call =
      OpDescriptor{OpKind::kBroadcast, DType::kFloat32, ReduceOp::kSum, 1, 4}.fingerprint();
  ActivityCell& cell = monitor.own_cell().collective;
  cell.begin(2, call, context.system.now());
  monitor.enter_collective(2);
  await_leave(context, group, 0);
  await(context, "the failure", [&] { return monitor.has_failed(); });
  cell.end(true, context.system.now());
  monitor.leave_collective();
  monitor.publish_leave(2, parting_deadline(context));
  return CommunicatorParts::impl_of(group).fabric->late_errors()->take();
}

// The leave of rank 0 fails the group, but no call of rank 1 throws that failure. So it must be
// reported when rank 1 leaves. Rank 2 fails together with the group and publishes no leave; rank 1
// must release the monitor of the group nevertheless.
TEST(Parting, ALeaveDuringACollectiveThatSucceedsIsReportedAndNothingIsKept) {
  const auto body = [](RankContext& context, Communicator& world) {
    const std::vector<Rank> all = {0, 1, 2};
    auto group = new_group(world, all, parting_deadline(context));
    broadcast(*group, 0);
    world.barrier();
    if (context.rank == 0) group->close(parting_deadline(context));
    if (context.rank == 1) {
      const std::weak_ptr<Monitor> kept = CommunicatorParts::impl_of(*group).monitor;
      const auto late = error_after_a_leave_beside_a_collective(context, *group);
      testing::require(late.has_value(), "nothing was reported");
      EXPECT_THAT(late->message(), HasSubstr("left the group after #1 (it ended its loop early?)"));
      group.reset();
      await(context, "the monitor to go", [&] { return kept.expired(); });
    }
    if (context.rank == 2) {
      await(context, "the failure", [&] { return monitor_of(*group).has_failed(); });
    }
    world.barrier();
    if (group != nullptr) group->close(parting_deadline(context));
  };
  EXPECT_THAT(outputs_of(body, 3), ::testing::Each(""));
}

// The group fails together with another group because of the leave of rank 0. That failure does not
// explain the mismatch, which must be reported.
TEST(Parting, ALeaveDuringACollectiveIsReportedInAGroupThatFailsTogetherWithAnother) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto side = new_group(world, kBoth, parting_deadline(context));
    const auto group = new_group(world, kBoth, parting_deadline(context));
    group->fail_together(*side);
    broadcast(*group, 0);
    world.barrier();
    if (context.rank == 0) group->close(parting_deadline(context));
    if (context.rank == 1) {
      testing::require(error_after_a_leave_beside_a_collective(context, *group).has_value(),
                       "the mismatch was not reported");
    }
    world.barrier();
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

// When the world fails, rank 0 has called the broadcast and rank 1 has not. The failure explains
// this difference, so no mismatch is reported.
TEST(Parting, NoMismatchIsReportedAfterAFailureOfTheWorld) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, parting_deadline(context));
    if (context.rank == 0) broadcast(*pair, 0);
    const std::string failure = testing::failure_of([&] {
      meet(context, world);
      if (context.rank == 0) world.abort("the disk is full");
      world.barrier();
    });
    EXPECT_THAT(failure, HasSubstr("the disk is full"));
    pair->close(parting_deadline(context));
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

TEST(Parting, ADestructorLeavesTheErrorOfAnotherGroupToTheNextClose) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, parting_deadline(context));
    auto other = new_group(world, kBoth, parting_deadline(context));
    broadcast(*pair, context.rank);
    meet(context, world);
    LateErrors& late = *CommunicatorParts::impl_of(*pair).fabric->late_errors();
    const std::string told = testing::failure_of([&] { pair->close(parting_deadline(context)); });
    if (!told.empty()) throw std::runtime_error(told);
    std::optional<Error> error;
    await(context, "the error", [&] { return (error = late.take()).has_value(); });
    late.add(*error);
    other.reset();
  });
  EXPECT_THAT(outputs, ::testing::Each(names_both(kPair)));
}

// A process keeps the monitor of a closed group until all ranks have left the group or the group
// has failed.
TEST(Parting, NoMonitorIsKeptOfAGroupThatFailedAroundItsClose) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    for (const bool leaves_before : {false, true}) {
      std::vector<std::weak_ptr<Monitor>> monitors;
      for (int i = 0; i < 20; ++i) {
        const auto pair = new_group(world, kBoth, parting_deadline(context));
        monitors.push_back(CommunicatorParts::impl_of(*pair).monitor);
        pair->barrier();
        if (context.rank == 0 && leaves_before) pair->close(parting_deadline(context));
        world.barrier();
        if (context.rank == 1) pair->abort("the program gave up");
        pair->close(parting_deadline(context));
        world.barrier();
      }
      await(context, "all monitors to go", [&] {
        return std::ranges::all_of(monitors, [](const auto& one) { return one.expired(); });
      });
      world.barrier();
    }
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

TEST(Parting, RanksThatAgreeReportNothing) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, parting_deadline(context));
    broadcast(*pair, 1);
    broadcast(world, 0);
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

}  // namespace
}  // namespace cadre
