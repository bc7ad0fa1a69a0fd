// Ranks that called different rooted operations last, each of which ended well over TCP because
// nothing was to be received: the disagreement is told when they close.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/comm/communicator_impl.h"
#include "cadre/comm/groups/split.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::RankContext;

constexpr Duration kLimit = seconds(20);
constexpr std::array<Rank, 2> kBoth = {0, 1};
constexpr const char* kPair = "world/1";

Deadline soon(RankContext& context) {
  return context.system.deadline_in(kLimit);
}

void pause(RankContext& context, Duration time) {
  context.system.make_waiter()->park(context.system.deadline_in(time));
}

void broadcast(Communicator& group, Rank root) {
  std::array<float, 4> data{};
  group.broadcast(std::as_writable_bytes(std::span(data)), DType::kFloat32, root);
}

// Two ranks over TCP; what each of them threw in `body` or when it closed the world after it.
std::vector<std::string> outputs_of(const std::function<void(RankContext&, Communicator&)>& body) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    CommunicatorOptions options;
    options.transport = TransportChoice::kTcp;
    options.timeout = kLimit;
    const Membership membership{context.rank, context.world_size, 1, store, "token"};
    const auto world = Communicator::connect(context.system, membership, options, soon(context));
    context.output = testing::failure_of([&] {
      body(context, *world);
      world->close(soon(context));
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

// Returns when both ranks have called it. Messages are numbered apart from collectives.
void meet(RankContext& context, Communicator& group) {
  const Rank other = 1 - context.rank;
  std::array<std::byte, 1> sent{};
  std::array<std::byte, 1> received{};
  Work sending = group.send_async(sent, DType::kUint8, other, 0);
  group.recv(received, DType::kUint8, other, 0);
  sending.wait();
}

TEST(Parting, ABroadcastFromEachOfTwoRanksIsToldWhenTheyCloseTheWorld) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    world.barrier();  // a rank that still connects would see the other's frame in the broadcast
    broadcast(world, context.rank);
    meet(context, world);
  });
  // The rank that leaves first cannot know yet what the other one called.
  EXPECT_THAT(outputs, ::testing::Contains(names_both("world", 2)));
  EXPECT_THAT(outputs, ::testing::Each(::testing::AnyOf("", names_both("world", 2))));
}

TEST(Parting, AGroupThatEachRankHasLeftIsToldOnceAtTheLatestWithTheWorld) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, soon(context));
    broadcast(*pair, context.rank);
    if (context.rank == 0) pair->close(soon(context));
    world.barrier();
    const std::string told = testing::failure_of([&] { pair->close(soon(context)); });
    world.barrier();
    if (told.empty()) return;
    EXPECT_EQ(context.rank, 1);
    EXPECT_EQ(testing::failure_of([&] { world.close(soon(context)); }), "");
    throw std::runtime_error(told);
  });
  EXPECT_THAT(outputs, ::testing::Each(names_both(kPair)));
}

TEST(Parting, ABroadcastThatTheOtherRankDidNotCallIsTold) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    world.barrier();
    if (context.rank == 1) broadcast(world, 1);
  });
  EXPECT_THAT(outputs, ::testing::Contains(::testing::AnyOf(
                           HasSubstr("left the group after #1 (it ended its loop early?)"))));
}

// A cell of the status page is used again after 128 groups; it must not show what the last group in
// it called.
TEST(Parting, GroupsWithoutACollectiveAgreeAlthoughTheirStatusCellsWereUsed) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    for (int i = 0; i < 130; ++i) {
      const auto alone = split(world, {.color = context.rank}, soon(context));
      if (context.rank == 0) alone->barrier();
      if (context.rank == 1) broadcast(*alone, 0);
    }
    for (int i = 0; i < 4; ++i) {
      new_group(world, kBoth, soon(context))->close(soon(context));
      world.barrier();
    }
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

// The other rank is told why by the failure itself.
TEST(Parting, RanksThatLeaveAFailedGroupAtDifferentPointsCloseInSilence) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, soon(context));
    broadcast(*pair, 0);
    if (context.rank == 1) {
      broadcast(*pair, 1);
      pair->close(soon(context));
    }
    world.barrier();
    if (context.rank == 0) pair->abort("the program gave up");
    pair->close(soon(context));
    world.barrier();
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

// Rank 0 has called the broadcast before it learns that the world failed, rank 1 has not.
TEST(Parting, AfterAFailureOfTheWorldItsGroupsCloseInSilence) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, soon(context));
    if (context.rank == 0) broadcast(*pair, 0);
    const std::string failure = testing::failure_of([&] {
      meet(context, world);
      if (context.rank == 0) world.abort("the disk is full");
      world.barrier();
    });
    EXPECT_THAT(failure, HasSubstr("the disk is full"));
    pair->close(soon(context));
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

TEST(Parting, ADestructorLeavesTheErrorOfAnotherGroupToTheNextClose) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, soon(context));
    auto other = new_group(world, kBoth, soon(context));
    broadcast(*pair, context.rank);
    meet(context, world);
    LateErrors& late = *CommunicatorParts::impl_of(*pair).fabric->late_errors();
    const std::string told = testing::failure_of([&] { pair->close(soon(context)); });
    if (!told.empty()) throw std::runtime_error(told);
    std::optional<Error> error;
    while (!(error = late.take())) pause(context, milliseconds(1));
    late.add(*error);
    other.reset();
  });
  EXPECT_THAT(outputs, ::testing::Each(names_both(kPair)));
}

// What a process keeps of a closed group until all ranks have left it goes when the group fails.
TEST(Parting, NothingIsKeptOfAGroupThatFailedAroundItsClose) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    for (const bool leaves_before : {false, true}) {
      std::vector<std::weak_ptr<Monitor>> monitors;
      for (int i = 0; i < 20; ++i) {
        const auto pair = new_group(world, kBoth, soon(context));
        monitors.push_back(CommunicatorParts::impl_of(*pair).monitor);
        pair->barrier();
        if (context.rank == 0 && leaves_before) pair->close(soon(context));
        world.barrier();
        if (context.rank == 1) pair->abort("the program gave up");
        pair->close(soon(context));
        world.barrier();
      }
      const Deadline deadline = soon(context);
      const auto is_kept = [](const auto& monitor) { return !monitor.expired(); };
      while (std::ranges::any_of(monitors, is_kept)) {
        testing::require(!deadline.has_passed(context.system.now()), "a monitor is kept");
        pause(context, milliseconds(1));
      }
      world.barrier();
    }
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

TEST(Parting, RanksThatAgreeCloseInSilence) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, soon(context));
    broadcast(*pair, 1);
    broadcast(world, 0);
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

}  // namespace
}  // namespace cadre
