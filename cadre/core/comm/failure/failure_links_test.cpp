// Tests how the failure of one group fails the groups that are linked to it.
#include "cadre/core/comm/failure/failure_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/failure/monitor.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/monitor_setup.h"

namespace cadre {
namespace {

// Provides the monitors of rank 3, in a job of four ranks, for the groups {1, 3} and {3, 1, 2}.
class LinkedMonitors : public ::testing::Test {
 protected:
  std::shared_ptr<Monitor> make(std::string name, std::vector<int> members, int self) {
    MonitorSetup setup = testing::setup_of(static_cast<int>(members.size()), nullptr);
    setup.roster.layout = layout_;
    setup.roster.group = std::move(name);
    setup.roster.members = std::move(members);
    setup.roster.self = self;
    return std::make_shared<Monitor>(*system_, std::move(setup), StatusPage(),
                                     std::make_shared<GroupCell>());
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const std::shared_ptr<const Layout> layout_ =
      std::make_shared<const Layout>(std::vector<wire::RankAddress>(4));
  const std::shared_ptr<Monitor> small_ = make("small", {1, 3}, 1);
  const std::shared_ptr<Monitor> large_ = make("large", {3, 1, 2}, 0);
};

TEST_F(LinkedMonitors, TheLossOfAMemberOfBothHasItsRankInEach) {
  Monitor::link(small_, large_);
  small_->on_rank_lost({.rank = 1, .reporter = 3});
  ASSERT_TRUE(large_->has_failed());
  EXPECT_TRUE(large_->interrupt().is_raised());
  EXPECT_EQ(small_->error().details().culprit, Rank(0));
  const Error error = large_->error();
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.details().culprit, Rank(1));
  EXPECT_THAT(error.message(), ::testing::HasSubstr("group \"small\""));
  // lost_ranks() must contain the rank even before the control plane reports its loss.
  EXPECT_TRUE(large_->peers()[1].is_gone);
}

TEST_F(LinkedMonitors, TheReporterOfALossIsTheMemberThatFoundItOrElseThisRank) {
  for (const auto& [reporter, expected] : {std::pair(1, 0), {2, 1}, {0, 2}}) {
    const auto group = make("other", {1, 2, 3}, 2);
    group->on_rank_lost({.rank = reporter == 2 ? 1 : 2, .reporter = reporter});
    EXPECT_EQ(group->error().details().reporter, Rank(expected)) << reporter;
  }
}

// Rank 2 detected the first failure and is no member of the small group. The failure of the small
// group must name no reporter.
TEST_F(LinkedMonitors, ARankThatOnlyHeardOfAFailureIsNotItsReporter) {
  Monitor::link(small_, large_);
  large_->on_group_failed({1, 2, {ErrorCode::kTimeout, -1, 2, "too slow", "all_reduce #1 failed"}});
  ASSERT_EQ(large_->error().details().reporter, Rank(2));
  const Error error = small_->error();
  EXPECT_FALSE(error.details().reporter.has_value());
  EXPECT_THAT(error.message(), ::testing::HasSubstr("look at the first failure"));
}

TEST_F(LinkedMonitors, TheLossOfARankOutsideIsAnAbortWithoutACulprit) {
  Monitor::link(small_, large_);
  large_->on_rank_lost({.rank = 2, .reporter = 3});
  ASSERT_TRUE(small_->has_failed());
  const Error error = small_->error();
  EXPECT_EQ(error.code(), ErrorCode::kAborted);
  EXPECT_FALSE(error.details().culprit.has_value());
  EXPECT_THAT(error.message(), ::testing::HasSubstr("first failure: group \"large\""));
}

// The large group loses rank 2. The failure passes through the small group, which does not contain
// rank 2, to the group {2, 3}, which must report the loss of rank 2.
TEST_F(LinkedMonitors, TheLossOfARankPassesThroughAGroupWithoutIt) {
  const std::shared_ptr<Monitor> behind = make("behind", {2, 3}, 1);
  Monitor::link(large_, small_);
  Monitor::link(small_, behind);
  large_->on_rank_lost({.rank = 2, .reporter = 3});
  const Error error = behind->error();
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.details().culprit, Rank(0));
  EXPECT_TRUE(behind->peers()[0].is_gone);
}

TEST_F(LinkedMonitors, ANoticeOfAGroupWithoutTheLostRankNamesIt) {
  Monitor::link(small_, large_);
  small_->on_group_failed({1, 1, {ErrorCode::kPeerLost, 2, 1, "rank 2 is gone", "barrier failed"}});
  EXPECT_EQ(small_->error().code(), ErrorCode::kAborted);
  const Error error = large_->error();
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.details().culprit, Rank(2));
}

// A rank that left one group in good order may still be in the other group, which must not report
// it as lost.
TEST_F(LinkedMonitors, ARankThatLeftOneGroupIsNotLostInTheOther) {
  Monitor::link(small_, large_);
  small_->on_rank_left_group({.rank = 1, .num_collectives = 4});
  small_->enter_collective(5);
  EXPECT_EQ(small_->error().code(), ErrorCode::kPeerLost);
  EXPECT_EQ(large_->error().code(), ErrorCode::kAborted);
  EXPECT_EQ(large_->error().details().culprit, Rank(1));
}

TEST_F(LinkedMonitors, AnEarlierFailureCountsAndOneThatIsDestroyedDoesNot) {
  small_->fail({.code = ErrorCode::kUnavailable, .cause = "no memory"});
  Monitor::link(make("gone", {3}, 0), large_);
  Monitor::link(large_, small_);
  EXPECT_THAT(large_->error().message(), ::testing::HasSubstr("no memory"));
  EXPECT_EQ(small_->error().code(), ErrorCode::kUnavailable);
}

TEST_F(LinkedMonitors, AFailurePassesOnceThroughARingOfClosedGroups) {
  const std::shared_ptr<Monitor> behind = make("behind", {2, 3}, 1);
  const std::shared_ptr<Monitor> last = make("last", {0, 3}, 1);
  Monitor::link(small_, large_);
  Monitor::link(large_, behind);
  Monitor::link(behind, small_);
  Monitor::link(behind, last);
  large_->stop();
  behind->stop();
  small_->fail({.code = ErrorCode::kUnavailable, .cause = "no memory"});
  EXPECT_FALSE(large_->has_failed() || behind->has_failed());
  EXPECT_THAT(last->error().message(), ::testing::HasSubstr("no memory"));
}

TEST_F(LinkedMonitors, AGroupThatIsBeingLeftDoesNotFail) {
  Monitor::link(small_, large_);
  large_->stop();
  small_->fail({.code = ErrorCode::kUnavailable, .cause = "no memory"});
  EXPECT_FALSE(large_->has_failed());
}

}  // namespace
}  // namespace cadre
