// Tests survivors, which are threads, that agree on a new world through one store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Survivor {
  int rank;
  std::vector<Rank> lost;
  std::string group = "world";
};

class RejoinTest : public ::testing::Test {
 protected:
  Membership member(int rank, int world_size, uint64_t round = 3) const {
    return {.rank = rank,
            .world_size = world_size,
            .round = round,
            .store = store_,
            .job_token = "token"};
  }

  // Lets all survivors rejoin at the same time. Returns their results in the order of `survivors`.
  std::vector<Result<Membership>> rejoin_all(int world_size, const std::vector<Survivor>& survivors,
                                             Duration budget, uint64_t round = 3) {
    std::vector<std::optional<Result<Membership>>> found(survivors.size());
    std::vector<std::unique_ptr<os::Thread>> threads;
    for (size_t i = 0; i < survivors.size(); ++i) {
      threads.push_back(system_->spawn("survivor", [&, i] {
        Membership previous = member(survivors[i].rank, world_size, round);
        previous.group = survivors[i].group;
        found[i] = rejoin(*system_, previous, survivors[i].lost, system_->deadline_in(budget));
      }));
    }
    for (auto& thread : threads) thread->join();
    std::vector<Result<Membership>> results;
    for (auto& result : found) results.push_back(std::move(*result));
    return results;
  }

  std::unique_ptr<os::System> system_ = os::make_native_system();
  std::shared_ptr<Store> store_ = std::make_shared<HashStore>(*system_);
};

TEST_F(RejoinTest, SurvivorsKeepTheirOrderAndTakeTheNextRound) {
  const auto next = rejoin_all(4, {{0, {1}}, {2, {1}}, {3, {1}}}, seconds(20));
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_TRUE(next[i].ok()) << next[i].error().message();
    EXPECT_EQ(next[i]->rank, static_cast<int>(i));
    EXPECT_EQ(next[i]->world_size, 3);
    EXPECT_EQ(next[i]->round, 4u);
    EXPECT_EQ(next[i]->store, store_);
    EXPECT_EQ(next[i]->job_token, "token");
  }
}

// Two subgroups of one job rejoin in the same round. Each of them has lost a different rank, and
// must decide independently of the other.
TEST_F(RejoinTest, TwoGroupsDecideApart) {
  const auto next = rejoin_all(
      3,
      {{0, {1}, "world/1.0"}, {2, {1}, "world/1.0"}, {0, {2}, "world/1.1"}, {1, {2}, "world/1.1"}},
      seconds(20));
  const std::vector<int> ranks = {0, 1, 0, 1};
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_TRUE(next[i].ok()) << next[i].error().message();
    EXPECT_EQ(next[i]->rank, ranks[i]);
    EXPECT_EQ(next[i]->world_size, 2);
    EXPECT_EQ(next[i]->group, i < 2 ? "world/1.0" : "world/1.1");
  }
}

TEST_F(RejoinTest, WhatOneSurvivorKnowsAllKnow) {
  // No rank knows of both lost ranks. If the ranks did not exchange what they know, each would wait
  // for most of its time.
  const Duration budget = seconds(60);
  const TimePoint start = system_->now();
  const auto next = rejoin_all(4, {{0, {1}}, {3, {2}}}, budget);
  EXPECT_LT(system_->now() - start, budget / 2);
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_TRUE(next[i].ok()) << next[i].error().message();
    EXPECT_EQ(next[i]->rank, static_cast<int>(i));
    EXPECT_EQ(next[i]->world_size, 2);
  }
}

TEST_F(RejoinTest, ASurvivorThatDiesBeforeItSpokeIsLeftBehind) {
  // No survivor knows that rank 2 is lost, and rank 2 never rejoins. The others must continue
  // without it.
  const auto next = rejoin_all(4, {{0, {1}}, {3, {1}}}, milliseconds(400));
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_TRUE(next[i].ok()) << next[i].error().message();
    EXPECT_EQ(next[i]->world_size, 2);
    EXPECT_EQ(next[i]->rank, static_cast<int>(i));
  }
}

TEST_F(RejoinTest, ASurvivorThatDiesAfterItSpokeIsLostInTheNextRound) {
  auto next = rejoin_all(4, {{0, {1}}, {2, {1}}, {3, {1}}}, seconds(20));
  for (const auto& result : next) ASSERT_TRUE(result.ok());
  // The rank whose number was 2 and is now 1 dies before the new group is connected.
  next = rejoin_all(3, {{0, {1}}, {2, {1}}}, seconds(20), 4);
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_TRUE(next[i].ok()) << next[i].error().message();
    EXPECT_EQ(next[i]->rank, static_cast<int>(i));
    EXPECT_EQ(next[i]->world_size, 2);
    EXPECT_EQ(next[i]->round, 5u);
  }
}

TEST_F(RejoinTest, ARankThatComesAfterTheDecisionIsAborted) {
  for (const auto& result : rejoin_all(3, {{0, {2}}, {1, {2}}}, seconds(20))) {
    ASSERT_TRUE(result.ok());
  }
  const auto late = rejoin(*system_, member(2, 3), {}, system_->deadline_in(seconds(20)));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), ErrorCode::kAborted);
  EXPECT_NE(late.error().message().find("rank 2"), std::string::npos) << late.error().message();
  EXPECT_NE(late.error().message().find("0,1"), std::string::npos) << late.error().message();
}

TEST_F(RejoinTest, NobodyLostMeansTheSameRanksInANewRound) {
  const auto next = rejoin_all(3, {{0, {}}, {1, {}}, {2, {}}}, seconds(20));
  for (size_t i = 0; i < next.size(); ++i) {
    ASSERT_TRUE(next[i].ok());
    EXPECT_EQ(next[i]->rank, static_cast<int>(i));
    EXPECT_EQ(next[i]->world_size, 3);
    EXPECT_EQ(next[i]->round, 4u);
  }
}

TEST_F(RejoinTest, TheLastSurvivorIsAWorldOfOne) {
  const auto next = rejoin_all(2, {{1, {0}}}, seconds(20));
  ASSERT_TRUE(next[0].ok());
  EXPECT_EQ(next[0]->rank, 0);
  EXPECT_EQ(next[0]->world_size, 1);
}

TEST_F(RejoinTest, ConflictingViewsStillEndInOneDecision) {
  // Each rank believes that the other one is lost. One of them must rejoin, and the other one must
  // get an error.
  const auto next = rejoin_all(2, {{0, {1}}, {1, {0}}}, seconds(20));
  int winners = 0;
  for (const auto& result : next) {
    if (result.ok()) {
      ++winners;
      EXPECT_EQ(result->world_size, 1);
    } else {
      EXPECT_EQ(result.error().code(), ErrorCode::kAborted);
    }
  }
  EXPECT_EQ(winners, 1);
}

TEST_F(RejoinTest, GarbageInTheStoreIsNotBelieved) {
  const Deadline soon = system_->deadline_in(seconds(20));
  for (const char* garbage : {"0,7", "x", "0;1", "0,", "-1"}) {
    ASSERT_TRUE(store_->set("cadre/4/world/rejoin/decision", garbage, soon).ok());
    const auto result = rejoin(*system_, member(0, 2), {}, soon);
    ASSERT_FALSE(result.ok()) << garbage;
    EXPECT_EQ(result.error().code(), ErrorCode::kCorruption) << garbage;
  }
}

TEST_F(RejoinTest, ProgramsGiveATimeAndGetExceptions) {
  struct Stub final : Rendezvous {
    Result<Membership> join(Deadline deadline) override {
      given = deadline;
      return Error(ErrorCode::kTimeout, "nobody came");
    }
    std::optional<Deadline> given;
  };
  Stub stub;
  const Deadline first = system_->deadline_in(seconds(20));
  EXPECT_EQ(testing::failure_of([&] { join_within(*system_, stub, seconds(20)); }),
            "kTimeout: nobody came");
  EXPECT_GE(stub.given, first);
  EXPECT_LT(*stub.given, system_->deadline_in(seconds(21)));
  EXPECT_EQ(rejoin_within(*system_, member(0, 1), {}, seconds(20)).round, 4u);
  ASSERT_TRUE(
      store_->set("cadre/4/world/rejoin/decision", "x", system_->deadline_in(seconds(20))).ok());
  EXPECT_THAT(testing::failure_of([&] { rejoin_within(*system_, member(0, 2), {}, seconds(20)); }),
              ::testing::StartsWith("kCorruption: "));
}

// The call is refused before this rank writes a note, because other ranks would refuse that note.
TEST_F(RejoinTest, WhatCannotBeRightOnAnyRankIsRefused) {
  const std::vector<Rank> lost = {Rank(9)};
  EXPECT_EQ(testing::failure_of([&] { rejoin_within(*system_, member(0, 2), lost, seconds(20)); }),
            "kInvalidArgument: rejoin: rank 9 of the lost ranks is not in the world of 2 ranks");
  EXPECT_TRUE(store_->list_keys(system_->deadline_in(seconds(20))).value_or_throw().empty());
  Membership without_store = member(0, 2);
  without_store.store = nullptr;
  EXPECT_EQ(testing::failure_of([&] { rejoin_within(*system_, without_store, {}, seconds(20)); }),
            "kInvalidArgument: rejoin: a membership of 2 ranks needs a store");
}

}  // namespace
}  // namespace cadre
