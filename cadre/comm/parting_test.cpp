// Ranks that called different rooted operations last, each of which ended well over TCP because
// nothing was to be received: the disagreement is told when they close.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/comm/communicator.h"
#include "cadre/comm/groups/split.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::RankContext;

constexpr Duration kLimit = seconds(20);
constexpr std::array<Rank, 2> kBoth = {0, 1};
constexpr const char* kPair = "world/1";

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
    const auto world = Communicator::connect(context.system, membership, options,
                                             context.system.deadline_in(kLimit));
    context.output = testing::failure_of([&] {
      body(context, *world);
      world->close(context.system.deadline_in(kLimit));
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  std::vector<std::string> outputs;
  for (const auto& rank : result.ranks) outputs.push_back(rank.output);
  return outputs;
}

::testing::Matcher<std::string> names_both(const std::string& group) {
  return ::testing::AllOf(HasSubstr("group \"" + group + "\" failed on rank "),
                          HasSubstr("the ranks disagree: rank 0 ("),
                          HasSubstr(") called broadcast(float32 x 4, root 0) as #1, rank 1 ("),
                          HasSubstr(") called broadcast(float32 x 4, root 1) as #1"));
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
    broadcast(world, context.rank);
    meet(context, world);
  });
  // The rank that leaves first cannot know yet what the other one called.
  EXPECT_THAT(outputs, ::testing::Contains(names_both("world")));
  EXPECT_THAT(outputs, ::testing::Each(::testing::AnyOf("", names_both("world"))));
}

TEST(Parting, AGroupThatEachRankHasLeftIsToldOnceAtTheLatestWithTheWorld) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, context.system.deadline_in(kLimit));
    broadcast(*pair, context.rank);
    if (context.rank == 0) pair->close(context.system.deadline_in(kLimit));
    world.barrier();
    const std::string told =
        testing::failure_of([&] { pair->close(context.system.deadline_in(kLimit)); });
    world.barrier();
    if (told.empty()) return;
    EXPECT_EQ(context.rank, 1);
    EXPECT_EQ(testing::failure_of([&] { world.close(context.system.deadline_in(kLimit)); }), "");
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

TEST(Parting, RanksThatAgreeCloseInSilence) {
  const auto outputs = outputs_of([](RankContext& context, Communicator& world) {
    const auto pair = new_group(world, kBoth, context.system.deadline_in(kLimit));
    broadcast(*pair, 1);
    broadcast(world, 0);
  });
  EXPECT_THAT(outputs, ::testing::Each(""));
}

}  // namespace
}  // namespace cadre
