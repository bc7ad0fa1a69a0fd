// Tests groups that are created over a store by their members only, and what failed attempts leave
// behind. Ranks are threads, over shared memory and over TCP.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/groups/make_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/prefix_store.h"
#include "cadre/core/wire/store/store_message.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/thread_groups.h"

namespace cadre {
namespace {

class StoreGroups : public GroupsTest {
 protected:
  // Returns the key in the store that the member of the group with that id writes.
  static std::string member_key(const Communicator& world, const std::string& id, Rank member) {
    const uint64_t connection = CommunicatorParts::impl_of(world).fabric->connection_number();
    return format("cadre/1/{}/member/{}",
                  GroupIdentity::of_creation(id, connection, {}).unique_name(), member);
  }
};

INSTANTIATE_TEST_SUITE_P(Transports, StoreGroups,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         name_of_transport);

class SymmetricStoreGroups : public GroupsTest {};

INSTANTIATE_TEST_SUITE_P(SharedMemory, SymmetricStoreGroups,
                         ::testing::Values(TransportChoice::kAuto));

TEST_P(StoreGroups, MembersMakeAGroupByThemselvesOverAStore) {
  run(4, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {2, 0};
    if (world.rank() % 2 == 0) {
      const auto store = std::make_shared<PrefixStore>("plugin", store_);
      const auto pair =
          new_group_over_store(world, list, {.store = store, .id = "pair"}, soon(context));
      require(pair->rank() == (world.rank() == 2 ? 0 : 1), "order");
      std::vector<int64_t> values(100, world.rank().value);
      pair->all_reduce(bytes_of(values), bytes_of(values), DType::kInt64, ReduceOp::kSum);
      require(values.front() == 2 && values.back() == 2, "sum");
      pair->close(soon(context));
    }
    world.barrier();
    require(store_->list_keys(soon(context)).value_or_throw().empty(), "no key is left");
  });
}

TEST_P(StoreGroups, AMemberThatDoesNotComeToAGroupOverAStoreIsNamed) {
  run(3, [this](RankContext& context, Communicator& world) {
    if (world.rank() == 0) {
      const std::vector<Rank> list = {0, 2};
      const std::string failure = testing::failed_fields_of([&] {
        new_group_over_store(world, list, {.store = store_, .id = "late"},
                             context.system.deadline_in(milliseconds(200)));
      });
      require(failure == "kTimeout culprit=2", failure);
    }
    world.barrier();
  });
}

// Rank 1, which is no member, aborts the world, so rank 2 never makes the call. Rank 0 must throw
// that failure before its deadline.
TEST_P(StoreGroups, AFailureOfTheGroupEndsTheWaitForMembers) {
  std::atomic<int> num_ready = 0;
  run(3, [&](RankContext& context, Communicator& world) {
    world.barrier();
    ++num_ready;
    if (world.rank() == 0) {
      const std::vector<Rank> list = {0, 2};
      const Deadline deadline = soon(context);
      const StoreGroupOptions options{.store = store_, .id = "waiting"};
      const auto make = [&] { new_group_over_store(world, list, options, deadline); };
      const std::string failure = testing::failure_of(make);
      require(failure.find("abort() was called: the test") != std::string::npos, failure);
      require(testing::failure_of(make) == failure, "a later call has another failure");
      require(!deadline.has_passed(context.system.now()), "it waited until the deadline");
    }
    if (world.rank() == 1) {
      await(context, "the others", [&] { return num_ready == 3; });
      world.abort("the test");
    }
    await(context, "the failure", [&] { return monitor_of(world).has_failed(); });
  });
}

TEST_P(StoreGroups, AMemberThatHasLeftTheJobIsNamed) {
  run(2, [this](RankContext& context, Communicator& world) {
    world.barrier();
    if (world.rank() == 1) return;
    const std::vector<Rank> list = {0, 1};
    const Deadline deadline = soon(context);
    const auto make = [&] {
      new_group_over_store(world, list, {.store = store_, .id = "left"}, deadline);
    };
    const std::string failure = testing::failure_of(make);
    require(failure.find("kPeerLost") == 0, failure);
    require(failure.find("left the job before it called new_group_over_store") != std::string::npos,
            failure);
    require(!deadline.has_passed(context.system.now()), "it waited until the deadline");
  });
}

// The store still has the key of the failed attempt, so the same id is refused.
TEST_P(StoreGroups, ANewTryOverAStoreNeedsANewId) {
  run(2, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const auto make = [&](const std::string& id, Deadline deadline) {
      return new_group_over_store(world, list, {.store = store_, .id = id}, deadline);
    };
    if (world.rank() == 0) {
      const auto late = [&] { make("first", context.system.deadline_in(milliseconds(100))); };
      require(testing::failure_of(late).find("kTimeout") == 0, "rank 1 does not come");
      const std::string failure = testing::failure_of([&] { make("first", soon(context)); });
      require(failure.find("kInvalidArgument") == 0, failure);
      require(failure.find("the id \"first\" was used before") != std::string::npos, failure);
    }
    make("second", soon(context))->barrier();
  });
}

// All members that can detect the difference must throw long before the deadline.
TEST_P(StoreGroups, MembersWithOtherListsOverAStoreAreRefused) {
  run(3, [this](RankContext& context, Communicator& world) {
    const auto refused = [&](const std::string& id, const std::vector<Rank>& list) {
      const Deadline deadline = soon(context);
      const std::string failure = testing::failure_of(
          [&] { new_group_over_store(world, list, {.store = store_, .id = id}, deadline); });
      require(failure.find("kInvalidArgument") == 0, failure);
      require(failure.find("every member must pass the same ranks in the same order") !=
                  std::string::npos,
              failure);
      require(failure.find(format("rank {} passes others", 1 - world.rank())) != std::string::npos,
              failure);
      require(!deadline.has_passed(context.system.now()), "it waited until the deadline");
    };
    if (world.rank() < 2) {
      refused("orders", world.rank() == 0 ? std::vector<Rank>{0, 1} : std::vector<Rank>{1, 0});
      // Rank 1 lists rank 2, which never makes the call.
      refused("sizes", world.rank() == 0 ? std::vector<Rank>{0, 1} : std::vector<Rank>{0, 1, 2});
    }
    world.barrier();
  });
}

TEST_P(StoreGroups, AGroupOverNoStoreOrWithoutAnIdIsRefused) {
  run(2, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const auto failure = [&](const StoreGroupOptions& options) {
      return testing::failure_of(
          [&] { new_group_over_store(world, list, options, soon(context)); });
    };
    require(failure({.store = nullptr, .id = "x"}).find("StoreGroupOptions::store is null") !=
                std::string::npos,
            "no store");
    require(failure({.store = store_, .id = ""}).find("id is empty") != std::string::npos, "no id");
  });
}

// Rank 0 times out before rank 2 calls. Ranks 1 and 2 find all keys and create the group, which
// must then fail.
TEST_P(StoreGroups, AMemberThatGivesUpFailsTheGroupOfThoseThatCameLater) {
  std::atomic<bool> has_given_up = false;
  run(3, [&](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1, 2};
    const StoreGroupOptions options{.store = store_, .id = "late"};
    if (world.rank() == 0) {
      const std::string failure = testing::failed_fields_of([&] {
        new_group_over_store(world, list, options, context.system.deadline_in(milliseconds(200)));
      });
      require(failure == "kTimeout culprit=2", failure);
      has_given_up = true;
    } else {
      const Deadline deadline = soon(context);
      while (world.rank() == 2 && !has_given_up) context.system.yield();
      const auto group = new_group_over_store(world, list, options, deadline);
      const std::string failure = testing::failure_of([&] { group->barrier(); });
      require(failure.find("gave up making the group") != std::string::npos, failure);
      require(!deadline.has_passed(context.system.now()), "it waited until the deadline");
    }
    world.barrier();
  });
}

// A user-defined store whose error names a rank that is not in the group.
class StrayingStore final : public Store {
 public:
  explicit StrayingStore(std::shared_ptr<Store> inner)
      : Store(inner->system()), inner_(std::move(inner)) {}
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_->clone(deadline);
  }

 private:
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override {
    if (request.verb != wire::StoreVerb::kMultiGet)
      return inner_->call(std::move(request), deadline);
    return Error(ErrorCode::kPeerLost, "the disk is gone").with_details({.culprit = Rank(77)});
  }
  const std::shared_ptr<Store> inner_;
};

TEST_P(StoreGroups, AnErrorOfTheStoreThatNamesNoMemberIsThisRanks) {
  run(2, [&](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    StoreGroupOptions options{.store = store_, .id = "straying"};
    if (world.rank() == 0) options.store = std::make_shared<StrayingStore>(store_);
    const std::string failure = testing::failure_of(
        [&] { new_group_over_store(world, list, options, soon(context))->barrier(); });
    require(failure.find("the disk is gone") != std::string::npos, failure);
    if (world.rank() == 1) require(failure.find("rank 0") != std::string::npos, failure);
    world.barrier();
  });
}

// The refused call has written no key, so no other rank knows where its pieces of memory are. They
// must be released.
TEST_P(SymmetricStoreGroups, AnIdOfAStoreThatIsRefusedLeavesNoMemoryBehind) {
  run(2, [this](RankContext& context, Communicator& world) {
    if (world.rank() == 0) {
      const std::vector<Rank> list = {0, 1};
      const auto failure = [&](Deadline deadline) {
        return testing::failure_of(
            [&] { new_group_over_store(world, list, {.store = store_, .id = "used"}, deadline); });
      };
      const std::string first = failure(context.system.deadline_in(milliseconds(100)));
      require(first.find("kTimeout") == 0, first);  // rank 1 does not call
      const size_t before = next_offset(world);
      for (int again = 0; again < 3; ++again) {
        const std::string refused = failure(soon(context));
        require(refused.find("the id \"used\" was used before") != std::string::npos, refused);
        require(next_offset(world) == before, "a piece of a group that was refused is left");
      }
    }
    world.barrier();
  });
}

// A second call with an id is refused, and the group that has the id continues to work. The test
// writes the key of a member into the store again, because the key is there until the slowest
// member has read it.
TEST_P(StoreGroups, ARefusedIdLeavesTheGroupThatHasItAtWork) {
  run(2, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const StoreGroupOptions options{.store = store_, .id = "shared"};
    const auto group = new_group_over_store(world, list, options, soon(context));
    world.barrier();
    const std::string key = member_key(world, "shared", context.rank);
    store_->set(key, "there", soon(context)).value_or_throw();
    const std::string refused =
        testing::failure_of([&] { new_group_over_store(world, list, options, soon(context)); });
    require(refused.find("the id \"shared\" was used before") != std::string::npos, refused);
    world.barrier();
    group->barrier();
    world.barrier();
    group->barrier();
  });
}

// The keys of the first group have been erased already, but this rank is still a member of it, so
// its id is refused.
TEST_P(StoreGroups, AnIdThatThisRankUsesIsRefused) {
  run(2, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const StoreGroupOptions options{.store = store_, .id = "twin"};
    const auto group = new_group_over_store(world, list, options, soon(context));
    group->barrier();
    const std::string refused =
        testing::failure_of([&] { new_group_over_store(world, list, options, soon(context)); });
    require(refused.find("kInvalidArgument") == 0, refused);
    require(refused.find("the id \"twin\" was used before, this rank has a group of this id") !=
                std::string::npos,
            refused);
    group->barrier();
    world.barrier();
    require(store_->list_keys(soon(context)).value_or_throw().empty(), "no key is left");
    world.barrier();
  });
}

// An earlier attempt has left the key of rank 0. So rank 1 finds all keys that it needs and makes
// the group, in which rank 0 never takes part. So the group must fail on rank 1.
TEST_P(StoreGroups, ARankWhoseIdIsRefusedFailsTheGroupOfTheOthers) {
  run(2, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const StoreGroupOptions options{.store = store_, .id = "again"};
    if (context.rank == 0) {
      const Deadline early = context.system.deadline_in(milliseconds(50));
      const StoreGroupOptions other{.store = store_, .id = "other"};
      testing::failure_of([&] { new_group_over_store(world, list, other, early); });
      const auto key = store_->get(member_key(world, "other", 0), soon(context)).value_or_throw();
      store_->set(member_key(world, "again", 0), key, soon(context)).value_or_throw();
    }
    world.barrier();
    const std::string failure = testing::failure_of(
        [&] { new_group_over_store(world, list, options, soon(context))->barrier(); });
    require(failure.find("the id \"again\" was used before") != std::string::npos, failure);
    const bool is_told = failure.find("gave up making the group") != std::string::npos;
    require(is_told == (context.rank == 1), failure);
    world.barrier();
  });
}

// The first operation of the world is a split that gives its group the id which the program has
// chosen for another group.
TEST_P(StoreGroups, AnIdThatSplitDerivesLaterIsOfAnotherGroup) {
  run(3, [this](RankContext& context, Communicator& world) {
    const auto sum_over = [](Communicator& group, int64_t value) {
      std::vector<int64_t> values(1000, value);
      group.all_reduce(bytes_of(values), bytes_of(values), DType::kInt64, ReduceOp::kSum);
      return values.front();
    };
    const std::vector<Rank> list = {0, 1};
    const int64_t value = int64_t{1} << (4 * context.rank.value);
    std::unique_ptr<Communicator> pair;
    if (context.rank < 2) {
      pair = new_group_over_store(world, list, {.store = store_, .id = "world/1.0"}, soon(context));
    }
    const auto all = split(world, {.color = 0}, soon(context));
    require(all->id() == "world/1.0", all->id());
    for (int i = 0; i < 3; ++i) {
      if (pair) require(sum_over(*pair, value) == 0x011, "the sum of the pair");
      require(sum_over(*all, value) == 0x111, "the sum of all");
    }
    if (pair) pair->close(soon(context));
    world.barrier();
    require(sum_over(*all, value) == 0x111, "the sum of all without the pair");
    all->close(soon(context));
  });
}

// All members have left the first group with this id, and each rank knows that, so the id can be
// used again.
TEST_P(StoreGroups, AnIdIsFreeAgainWhenAllMembersHaveLeft) {
  run(2, [this](RankContext& context, Communicator& world) {
    const std::vector<Rank> list = {0, 1};
    const StoreGroupOptions options{.store = store_, .id = "again"};
    for (int round = 0; round < 3; ++round) {
      const auto group = new_group_over_store(world, list, options, soon(context));
      for (int i = 0; i <= round; ++i) group->barrier();
      group->close(soon(context));
      await_leave(context, *group, 1 - context.rank.value);
      world.barrier();
    }
  });
}

// Two groups with one id and different members, one after the other. Rank 0 is in both.
TEST_P(StoreGroups, GroupsOfOneIdWithOtherMembersStayApart) {
  run(3, [this](RankContext& context, Communicator& world) {
    const auto sum_of = [&](const std::vector<Rank>& list) {
      const auto group =
          new_group_over_store(world, list, {.store = store_, .id = "one"}, soon(context));
      std::vector<int64_t> values(100, int64_t{1} << (4 * context.rank.value));
      group->all_reduce(bytes_of(values), bytes_of(values), DType::kInt64, ReduceOp::kSum);
      group->close(soon(context));
      return values.front();
    };
    if (context.rank != 2) require(sum_of({0, 1}) == 0x011, "the sum of ranks 0 and 1");
    world.barrier();
    if (context.rank != 1) require(sum_of({0, 2}) == 0x101, "the sum of ranks 0 and 2");
    world.barrier();
    require(store_->list_keys(soon(context)).value_or_throw().empty(), "no key is left");
    world.barrier();
  });
}

// Each member sees that the other's list differs. So neither uses the memory that the other has
// allocated.
TEST_P(SymmetricStoreGroups, ListsThatDifferAtAStoreLeaveNoMemoryBehind) {
  run(2, [this](RankContext& context, Communicator& world) {
    const size_t before = next_offset(world);
    const std::vector<Rank> list = {context.rank, 1 - context.rank};
    const std::string failure = testing::failure_of(
        [&] { new_group_over_store(world, list, {.store = store_, .id = "list"}, soon(context)); });
    require(failure.find("every member must pass the same ranks") != std::string::npos, failure);
    world.barrier();
    require(next_offset(world) == before, "a piece of a group that was refused is left");
    world.barrier();
  });
}

// A store that changes the value in which a member describes its memory.
class ForgingStore final : public Store {
 public:
  ForgingStore(std::shared_ptr<Store> inner, uint32_t piece)
      : Store(inner->system()), inner_(std::move(inner)), piece_(piece) {}
  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_->clone(deadline);
  }

 private:
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override {
    const bool is_read = request.verb == wire::StoreVerb::kMultiGet;
    auto response = inner_->call(std::move(request), deadline);
    // The value that rank 1 has stored is a NewGroupCall. Its first Place is forged.
    constexpr size_t kPiece = offsetof(NewGroupCall, places) + offsetof(Place, piece);
    if (is_read && response.ok()) {
      std::memcpy(response->values[1].data() + kPiece, &piece_, sizeof(piece_));
    }
    return response;
  }
  const std::shared_ptr<Store> inner_;
  const uint32_t piece_;
};

TEST_P(SymmetricStoreGroups, APlaceOutsideOfTheMemoryIsRefused) {
  for (const uint32_t piece : {0u, HostMemory::kMaxPieces, 0x7fffffffu}) {
    run(2, [&](RankContext& context, Communicator& world) {
      const std::vector<Rank> list = {0, 1};
      StoreGroupOptions options{.store = store_, .id = format("forged{}", piece)};
      if (world.rank() == 0) options.store = std::make_shared<ForgingStore>(store_, piece);
      const std::string failure = testing::failure_of(
          [&] { new_group_over_store(world, list, options, soon(context))->barrier(); });
      require(failure.find("kCorruption") != std::string::npos || world.rank() == 1, failure);
      require(!failure.empty(), "a place outside was taken");
      world.barrier();
    });
  }
}

}  // namespace
}  // namespace cadre
