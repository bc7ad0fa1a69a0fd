// Tests concurrent operations of several groups of one process, and the resources that these groups
// share. Ranks are threads with one native System, over shared memory and over TCP.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <initializer_list>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/thread_groups.h"

namespace cadre {
namespace {

class Groups : public GroupsTest {};

INSTANTIATE_TEST_SUITE_P(Transports, Groups,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         name_of_transport);

TEST_P(Groups, RanksAreTranslatedToAndFromTheWorld) {
  run(4, [](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {3, 1};
    const auto pair = new_group(world, list, soon(context));
    require(world.global_ranks() == std::vector<Rank>({0, 1, 2, 3}), "all ranks of the world");
    if (pair == nullptr) return;
    require(pair->global_ranks() == list, "in the order of the list");
    require(pair->global_rank(0) == 3 && pair->global_rank(1) == 1, "of each rank");
    require(pair->group_rank(3) == Rank(0) && pair->group_rank(1) == Rank(1), "and back");
    require(!pair->group_rank(0) && !pair->group_rank(2), "of ranks that are not in it");
    require(testing::failure_of([&] { (void)pair->global_rank(2); }).find("kInvalidArgument") !=
                std::string::npos,
            "a rank that the group has not");
    const auto alone = split(*pair, {.color = pair->rank()}, soon(context));
    require(alone->global_ranks() == std::vector<Rank>{world.rank()}, "of a group of a group");
  });
}

// The ranks issue the operations of different groups in different orders, and some of them wait for
// the later operation first.
TEST_P(Groups, AsynchronousOperationsOfSeveralGroupsEndInWhateverOrderTheyAreIssued) {
  constexpr size_t kGroups = 4;
  run(3, [](RankContext& context, Communicator& world) {
    const int me = world.rank();
    std::vector<std::unique_ptr<Communicator>> groups;
    for (size_t i = 0; i < kGroups; ++i) {
      groups.push_back(
          split(world, {.color = 0, .key = me * (i % 2 == 0 ? 1 : -1)}, soon(context)));
    }
    for (int round = 0; round < 20; ++round) {
      std::array<std::vector<int64_t>, kGroups> values;
      std::vector<Work> works;
      for (size_t i = 0; i < kGroups; ++i) {
        const size_t at = (i * 3 + static_cast<size_t>(me + round)) % kGroups;
        values[at].assign(1 << 15, me + static_cast<int>(at));
        works.push_back(groups[at]->all_reduce_async(bytes_of(values[at]), bytes_of(values[at]),
                                                     DType::kInt64, ReduceOp::kSum));
      }
      while (!works.empty()) {
        const size_t at = static_cast<size_t>(me + round) % works.size();
        works[at].wait();
        works.erase(works.begin() + static_cast<ptrdiff_t>(at));
      }
      for (size_t i = 0; i < kGroups; ++i) {
        const auto sum = static_cast<int64_t>(0 + 1 + 2 + 3 * i);
        require(values[i].front() == sum && values[i].back() == sum, "sum");
      }
    }
    for (const auto& group : groups) group->close(soon(context));
  });
}

// Two ranks wait for each other in different groups. The error of each rank names the operation
// that the other rank runs.
TEST_P(Groups, BlockingCallsInOppositeOrdersAreNamedAtTheDeadline) {
  run(
      2,
      [](RankContext& context, Communicator& world) {
        const auto red = split(world, {.color = 0, .name = "red"}, soon(context));
        const auto blue = split(world, {.color = 0, .name = "blue"}, soon(context));
        Communicator& mine = world.rank() == 0 ? *red : *blue;
        const std::string other = world.rank() == 0 ? "blue" : "red";
        const std::string failure = testing::failure_of([&] { mine.barrier(); });
        // The other rank reaches its deadline at about the same time, and then asks this rank for
        // its status.
        context.system.make_waiter()->park(context.system.deadline_in(seconds(1)));
        require(failure.find("waiting for rank") != std::string::npos ||
                    failure.find("first failure") != std::string::npos,
                failure);
        require(failure.find("barrier #1 of group \"" + other + "\"") != std::string::npos,
                failure);
      },
      milliseconds(500));
}

TEST_P(Groups, AFailureOfOneGroupLeavesTheOthersAtWork) {
  run(3, [](RankContext& context, Communicator& world) {
    const auto first = split(world, {.color = 0, .name = "first"}, soon(context));
    const auto second = split(world, {.color = 0, .name = "second"}, soon(context));
    if (world.rank() == 1) first->abort("a test");
    const std::string failure = testing::failure_of([&] {
      while (true) first->barrier();
    });
    require(failure.find("abort() was called: a test") != std::string::npos, failure);
    for (int round = 0; round < 50; ++round) {
      std::vector<int64_t> values(1000, world.rank() + 1);
      second->all_reduce(bytes_of(values), bytes_of(values), DType::kInt64, ReduceOp::kSum);
      require(values.back() == 6, "sum of another group");
      world.barrier();
    }
    second->close(soon(context));
    first->close(soon(context));
  });
}

// The ranks form a grid of two rows. Only rank 0 learns of the abort directly, in its own row, and
// then leaves. Rank 2 waits for rank 0, and rank 3 for rank 2. All must throw the abort.
TEST_P(Groups, GroupsThatFailTogetherNameTheFirstFailureToAllMembers) {
  run(4, [](RankContext& context, Communicator& world) {
    const auto row = split(world, {.color = world.rank() / 2, .name = "row"}, soon(context));
    const auto column = split(world, {.color = world.rank() % 2, .name = "column"}, soon(context));
    row->fail_together(*column);
    world.barrier();
    if (world.rank() == 1) row->abort("a test");
    const std::string failure = testing::failure_of([&] {
      while (true) (world.rank() == 2 ? column : row)->barrier();
    });
    require(failure.starts_with("kAborted"), failure);
    require(failure.find("abort() was called: a test") != std::string::npos, failure);
    require(failure.find("left") == std::string::npos, failure);
    column->close(soon(context));
    row->close(soon(context));
  });
}

TEST_P(Groups, AGroupFailsWithTheEarlierFailureOfOneThatItIsTiedTo) {
  run(2, [](RankContext& context, Communicator& world) {
    const auto first = split(world, {.color = 0, .name = "first"}, soon(context));
    const auto second = split(world, {.color = 0, .name = "second"}, soon(context));
    const auto third = split(world, {.color = 0, .name = "third"}, soon(context));
    third->close(soon(context));
    world.barrier();
    if (world.rank() == 1) first->abort("a test");
    first->fail_together(*second);
    first->fail_together(*third);  // has no effect, because `third` is closed
    const std::string failure = testing::failure_of([&] {
      while (true) second->barrier();
    });
    require(failure.find("abort() was called: a test") != std::string::npos, failure);
    world.barrier();
    second->close(soon(context));
    first->close(soon(context));
  });
}

TEST_P(Groups, AClosedGroupMakesNoOther) {
  run(2, [this](RankContext& context, Communicator& world) {
    world.close(soon(context));
    const std::vector<Rank> list = {0, 1};
    const std::string failure = testing::failure_of(
        [&] { new_group_over_store(world, list, {.store = store_, .id = "pair"}, soon(context)); });
    require(failure == format("kInvalidArgument: new_group_over_store on group \"world\", rank {}: "
                              "the group is closed; connect a new one",
                              world.rank()),
            failure);
  });
}

TEST_P(Groups, AMessageIsReceivedFromWhicheverRankSendsIt) {
  run(4, [](RankContext&, Communicator& world) {
    constexpr size_t kLong = 100'000;
    if (world.rank() != 0) {
      std::vector<int64_t> values(world.rank() == 3 ? kLong : 3, world.rank().value);
      world.send(bytes_of(values), DType::kInt64, 0, world.rank() == 3 ? 9 : 5);
      return;
    }
    std::vector<int64_t> large(kLong);
    require(world.recv_from_any(bytes_of(large), DType::kInt64, 9) == 3, "the only one of its tag");
    require(large.front() == 3 && large.back() == 3, "its values");
    std::vector<int64_t> small(3);
    const Rank first = world.recv_from_any(bytes_of(small), DType::kInt64, 5);
    require(small[2] == first.value, "the source and its values fit");
    const Rank second = world.recv_from_any(bytes_of(small), DType::kInt64, 5);
    require(small[2] == second.value && first.value + second.value == 3, "each of the two once");
  });
}

TEST_P(Groups, AMessageFromAnyRankThatNeverComesEndsAtTheDeadline) {
  run(2, [](RankContext& context, Communicator& world) {
    if (world.rank() == 0) {
      std::vector<int64_t> values(1);
      const std::string failure = testing::failure_of([&] {
        world.recv_from_any(bytes_of(values), DType::kInt64, 1,
                            {.deadline = context.system.deadline_in(milliseconds(100))});
      });
      require(failure.find("kTimeout: recv #1 on group \"world\" timed out") == 0, failure);
    } else {
      // The rank waits here, because the receive of rank 0 would end earlier if this rank left the
      // group.
      testing::failure_of([&] { world.barrier(); });
    }
  });
}

TEST_P(Groups, AReceiveFromAnyRankEndsWhenAllOthersHaveLeft) {
  run(3, [](RankContext& context, Communicator& world) {
    const auto group = split(world, {.color = 0}, soon(context));
    if (world.rank() == 0) {
      std::vector<int64_t> values(1);
      const std::string failure =
          testing::failure_of([&] { group->recv_from_any(bytes_of(values), DType::kInt64, 1); });
      require(failure.find("kPeerLost") == 0, failure);
      require(failure.find("no other rank can send any more: rank 1 ") != std::string::npos,
              failure);
      require(failure.find(") left the group before its first collective (it ended its loop "
                           "early?). Remedy: ") != std::string::npos,
              failure);
    } else {
      group->close(soon(context));
    }
    world.barrier();
  });
}

class SymmetricGroups : public GroupsTest {};

INSTANTIATE_TEST_SUITE_P(SharedMemory, SymmetricGroups, ::testing::Values(TransportChoice::kAuto));

// A buffer that is symmetric in the world is symmetric in each subgroup, too.
TEST_P(SymmetricGroups, ABufferOfTheWorldIsReducedInPlaceInAGroup) {
  constexpr size_t kCount = 1 << 16;  // so large that peers' buffers are read in place
  run(4, [](RankContext& context, Communicator& world) {
    const auto buffer = world.allocate_symmetric(kCount * sizeof(int64_t));
    const auto half = split(world, {.color = world.rank() % 2}, soon(context));
    auto* const values = reinterpret_cast<int64_t*>(buffer->local().data());
    for (size_t i = 0; i < kCount; ++i) values[i] = world.rank() + static_cast<int64_t>(i);
    half->all_reduce(buffer->local(), buffer->local(), DType::kInt64, ReduceOp::kSum);
    const int64_t ranks = world.rank() % 2 == 0 ? 0 + 2 : 1 + 3;
    for (size_t i = 0; i < kCount; ++i) {
      require(values[i] == ranks + 2 * static_cast<int64_t>(i), format("element {}", i));
    }
    half->close(soon(context));
    world.barrier();
    require(reinterpret_cast<const int64_t*>(buffer->peer((world.rank() + 2) % 4).data())[5] ==
                values[5],
            "the partner's result is read in place");
  });
}

// All ranks refuse the group. No other rank has a hold on the memory that a rank allocated for it,
// so the memory is reused.
TEST_P(SymmetricGroups, AGroupThatIsRefusedLeavesNoMemoryBehind) {
  run(2, [](RankContext& context, Communicator& world) {
    const size_t before = next_offset(world);
    const std::string names[] = {"red", "blue"};
    const auto& name = names[world.rank().value];
    require(testing::failure_of([&] {
              split(world, {.color = 0, .name = name}, soon(context));
            }).find("let all ranks of a color give one name") != std::string::npos,
            "two names for one color");
    const std::vector<Rank> orders[] = {{0, 1}, {1, 0}};
    const auto& order = orders[world.rank().value];
    require(testing::failure_of([&] {
              new_group(world, order, soon(context));
            }).find("every rank must pass the same ranks") != std::string::npos,
            "two orders");
    require(next_offset(world) == before, "a piece of a group that was not made is left");
  });
}

// Rank 1 has no memory for a group. All ranks must throw at once and name rank 1, and the world
// must stay usable.
TEST_P(SymmetricGroups, ARankWithoutMemoryForAGroupIsNamedByAll) {
  run(3, [](RankContext& context, Communicator& world) {
    HostMemory& memory = *CommunicatorParts::impl_of(world).fabric->host_memory();
    std::vector<Piece> hoard;  // reserves addresses only, which takes no memory
    for (size_t size = memory.layout().slice_bytes; world.rank() == 1 && size >= 4096; size /= 2) {
      for (auto piece = memory.allocate({.num_bytes = size, .committed_bytes = 0}); piece.ok();
           piece = memory.allocate({.num_bytes = size, .committed_bytes = 0})) {
        hoard.push_back(std::move(piece).value());
      }
    }
    const std::vector<Rank> list = {0, 1, 2};
    for (const auto& make : std::initializer_list<std::function<void()>>{
             [&] { split(world, {.color = 0}, soon(context)); },
             [&] { new_group(world, list, soon(context)); }}) {
      const std::string failure = testing::failure_of(make);
      require(failure.find("kUnavailable") == 0, failure);
      const bool is_short = world.rank() == 1;
      const char* const sentence = is_short ? "host memory" : ") has too little shared memory";
      require(failure.find(sentence) != std::string::npos, failure);
      require(is_short || failure.find("rank 1 (") != std::string::npos, failure);
    }
    hoard.clear();
    const auto group = split(world, {.color = 0}, soon(context));
    group->barrier();
    group->close(soon(context));
  });
}

TEST_P(SymmetricGroups, ASplitOfAGroupThatHasEndedLeavesNoMemoryBehind) {
  run(2, [](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const auto closed = split(world, {.color = 0}, soon(context));
    const auto failed = split(world, {.color = 0}, soon(context));
    closed->close(soon(context));
    world.barrier();
    if (world.rank() == 0) failed->abort("a test");
    require(!testing::failure_of([&] { failed->barrier(); }).empty(), "it has failed");
    world.barrier();
    const size_t before = next_offset(world);
    for (Communicator* parent : {closed.get(), failed.get()}) {
      const char* const why = parent == closed.get() ? "is closed" : "abort() was called: a test";
      for (const auto& make :
           std::vector<std::function<void()>>{[&] { split(*parent, {.color = 0}, soon(context)); },
                                              [&] { new_group(*parent, list, soon(context)); }}) {
        const std::string failure = testing::failure_of(make);
        require(failure.find(why) != std::string::npos, failure);
      }
    }
    require(next_offset(world) == before, "pieces of refused calls stay");
    world.barrier();
  });
}

// A symmetric buffer of the group of round 1 must be treated as private memory in the group of
// round 2.
TEST_P(SymmetricGroups, ABufferOfAnEarlierRoundIsReducedLikePrivateMemory) {
  constexpr size_t kCount = 1 << 16;
  const auto result = testing::run_ranks_as_threads(2, [&](RankContext& context) {
    std::shared_ptr<SymmetricBuffer> old;
    for (uint64_t round = 1; round <= 2; ++round) {
      const auto world = Communicator::connect(
          context.system, {context.rank, 2, round, store_, "token"}, {}, soon(context));
      if (old == nullptr) old = world->allocate_symmetric(kCount * sizeof(int64_t));
      auto* const values = reinterpret_cast<int64_t*>(old->local().data());
      for (size_t i = 0; i < kCount; ++i) values[i] = world->rank() + static_cast<int64_t>(i);
      world->all_reduce(old->local(), old->local(), DType::kInt64, ReduceOp::kSum);
      for (size_t i = 0; i < kCount; ++i) {
        require(values[i] == 1 + 2 * static_cast<int64_t>(i), format("element {}", i));
      }
      world->barrier();
      world->close(soon(context));
    }
    require(old->peer(1 - context.rank.value).size() == kCount * sizeof(int64_t),
            "the pieces of the old peers stay readable");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
