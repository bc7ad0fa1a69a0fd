// Tests which events count as new, and how long they are kept.
#include "cadre/core/fabric/plane/event_log.h"

#include <gtest/gtest.h>

namespace cadre {
namespace {

using std::chrono::seconds;
using wire::Event;
using wire::FabricLeave;
using wire::GroupLeave;

constexpr TimePoint kStart{1'000'000'000'000};

LossReport loss_of(int rank, int reporter) {
  return {rank, reporter, SignOfLoss::kSilence, {}};
}

TEST(EventLog, TheFirstOfEachIdentityIsNews) {
  EventLog log(4, 0);
  EXPECT_TRUE(log.add(loss_of(2, 1), 1, kStart));
  EXPECT_FALSE(log.add(loss_of(2, 3), 3, kStart));
  EXPECT_EQ(log.loss_of(2)->reporter, 1);
  EXPECT_TRUE(log.add(GroupLeave{7, 1, 3}, 1, kStart));
  EXPECT_FALSE(log.add(GroupLeave{7, 1, 4}, 2, kStart));
  EXPECT_TRUE(log.add(GroupLeave{7, 2, 3}, 1, kStart));
  EXPECT_TRUE(log.add(GroupLeave{8, 1, 3}, 1, kStart));
  EXPECT_TRUE(log.add(GroupFailure{7, 1, {}}, 1, kStart));
  EXPECT_FALSE(log.add(GroupFailure{7, 2, {}}, 1, kStart));
  EXPECT_TRUE(log.add(FabricLeave{3}, 3, kStart));
  EXPECT_FALSE(log.add(FabricLeave{3}, 1, kStart));
  EXPECT_EQ(log.lost_ranks(), (std::vector<int>{2}));
  EXPECT_TRUE(log.has_left(3));
  EXPECT_EQ(log.presence(), (std::vector<bool>{true, true, false, false}));
}

TEST(EventLog, ARankThatLeftIsNotLost) {
  EventLog log(2, 0);
  EXPECT_TRUE(log.add(FabricLeave{1}, 1, kStart));
  EXPECT_FALSE(log.add(loss_of(1, 0), EventLog::kOwn, kStart));
  EXPECT_FALSE(log.is_lost(1));
}

// Rank 1 was killed before its leave event had reached all peers. Rank 0 has the event, and rank 2
// reports a loss.
TEST(EventLog, ALossThatAnotherRankReportsIsNewsAlsoAfterTheLeave) {
  EventLog log(3, 0);
  EXPECT_TRUE(log.add(FabricLeave{1}, 1, kStart));
  EXPECT_TRUE(log.add(loss_of(1, 2), 2, kStart));
  EXPECT_FALSE(log.add(loss_of(1, 2), 2, kStart));
  EXPECT_TRUE(log.has_left(1));
  EXPECT_EQ(log.of_group(7, kStart), (std::vector<Event>{loss_of(1, 2)}));
  EventLog of_rank_2(3, 2);
  EXPECT_TRUE(of_rank_2.add(FabricLeave{1}, 1, kStart));
  EXPECT_TRUE(of_rank_2.add(loss_of(1, 0), 0, kStart)) << "for rank 2, rank 0 is another rank";
}

TEST(EventLog, RanksThatDoNotExistAreNoNews) {
  EventLog log(2, 0);
  for (const int rank : {-1, 2, 1'000'000}) {
    EXPECT_FALSE(log.add(loss_of(rank, 0), 1, kStart));
    EXPECT_FALSE(log.add(loss_of(0, rank), 1, kStart));
    EXPECT_FALSE(log.add(FabricLeave{rank}, 1, kStart));
    EXPECT_FALSE(log.add(GroupLeave{7, rank, 0}, 1, kStart));
    EXPECT_FALSE(log.add(GroupFailure{7, rank, {}}, 1, kStart));
  }
  EXPECT_FALSE(log.add(wire::StatusQuestion{1, 1, 7}, 1, kStart));
  EXPECT_TRUE(log.all(kStart).empty());
}

TEST(EventLog, ThisRankIsPresentAlsoWhenItIsTakenForLost) {
  EventLog log(2, 0);
  EXPECT_TRUE(log.add(loss_of(0, 1), 1, kStart));
  EXPECT_TRUE(log.presence()[0]);
  EXPECT_TRUE(log.lost_ranks().empty());
  EXPECT_TRUE(log.is_lost(0));
}

TEST(EventLog, EventsOfGroupsExpireButStayKnown) {
  EventLog log(2, 0);
  log.add(GroupLeave{7, 1, 3}, 1, kStart);
  log.add(FabricLeave{1}, 1, kStart);
  EXPECT_EQ(log.all(kStart + seconds(59)).size(), 2u);
  EXPECT_EQ(log.all(kStart + seconds(61)), (std::vector<Event>{FabricLeave{1}}));
  EXPECT_FALSE(log.add(GroupLeave{7, 1, 3}, 1, kStart + seconds(61)));
}

TEST(EventLog, HoldsABoundedNumberOfEntries) {
  EventLog log(2, 0);
  for (uint64_t group = 1; group <= 3 * EventLog::kMaxEntries; ++group) {
    ASSERT_TRUE(log.add(GroupLeave{group, 1, 0}, 1, kStart));
  }
  EXPECT_EQ(log.all(kStart).size(), EventLog::kMaxEntries);
  EXPECT_FALSE(log.add(GroupLeave{EventLog::kMaxEntries + 1, 1, 0}, 1, kStart));
  // A duplicate that arrives over a slower path is not new, even if more events than kMaxEntries
  // came in between.
  EXPECT_FALSE(log.add(GroupLeave{1, 1, 0}, 1, kStart));
  const TimePoint later = kStart + EventLog::kMaxAge;
  EXPECT_TRUE(log.add(GroupLeave{3 * EventLog::kMaxEntries + 1, 1, 0}, 1, later));
  EXPECT_TRUE(log.add(GroupLeave{1, 1, 0}, 1, later))
      << "after kMaxAge the event is no longer known and counts as new";
}

TEST(EventLog, ReturnsTheEventsOfOneRankAndOfOneGroup) {
  EventLog log(5, 0);
  log.add(loss_of(4, 2), 2, kStart);
  log.add(FabricLeave{3}, 1, kStart);
  log.add(GroupLeave{7, 1, 3}, 1, kStart);
  log.add(GroupLeave{8, 1, 3}, 2, kStart);
  log.add(GroupFailure{7, 2, {}}, EventLog::kOwn, kStart);
  EXPECT_EQ(log.told_by(1, kStart), (std::vector<Event>{FabricLeave{3}, GroupLeave{7, 1, 3}}));
  EXPECT_EQ(log.told_by(2, kStart), (std::vector<Event>{loss_of(4, 2), GroupLeave{8, 1, 3}}));
  EXPECT_EQ(log.of_group(7, kStart),
            (std::vector<Event>{loss_of(4, 2), GroupLeave{7, 1, 3}, GroupFailure{7, 2, {}}}));
}

// The log finds the events of each of 1000 groups, also after the oldest events have expired.
TEST(EventLog, FindsTheEventsOfEachGroupAmongMany) {
  EventLog log(3, 0);
  constexpr uint64_t kNumGroups = 1000;
  for (int rank = 1; rank <= 2; ++rank) {
    const TimePoint at = kStart + seconds(30 * (rank - 1));
    for (uint64_t group = 1; group <= kNumGroups; ++group) {
      log.add(GroupLeave{group, rank, group}, rank, at);
    }
  }
  const auto leaves_of = [&](uint64_t group, TimePoint now) {
    std::vector<int> ranks;
    for (const Event& event : log.of_group(group, now)) {
      EXPECT_EQ(std::get<GroupLeave>(event).num_collectives, group);
      ranks.push_back(std::get<GroupLeave>(event).rank);
    }
    return ranks;
  };
  EXPECT_EQ(leaves_of(500, kStart + seconds(59)), (std::vector<int>{1, 2}));
  EXPECT_EQ(leaves_of(500, kStart + seconds(61)), (std::vector<int>{2}));
  EXPECT_TRUE(log.add(GroupLeave{2000, 1, 2000}, 1, kStart + seconds(61)));
  EXPECT_EQ(leaves_of(2000, kStart + seconds(61)), (std::vector<int>{1}));
  EXPECT_EQ(leaves_of(1000, kStart + seconds(61)), (std::vector<int>{2}));
  EXPECT_TRUE(leaves_of(500, kStart + seconds(95)).empty());
  EXPECT_TRUE(leaves_of(2001, kStart).empty());
}

}  // namespace
}  // namespace cadre
