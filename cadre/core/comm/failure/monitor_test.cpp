// Tests which failure the monitor of a group raises, and what it knows about peers.
#include "cadre/core/comm/failure/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/testing/core/plane_job.h"

namespace cadre {
namespace {

// Returns the setup of rank 0 in a group of all ranks.
MonitorSetup setup_of(int world_size, ControlPlane* plane) {
  const auto num_ranks = static_cast<size_t>(world_size);
  return {.roster = {"world", 0,
                     std::make_shared<const Layout>(std::vector<wire::RankAddress>(num_ranks)),
                     all_ranks(world_size)},
          .key = 1,
          .plane = plane,
          .slots = std::vector<int>(num_ranks, -1),
          .record_path = "",
          .log = nullptr};
}

class MonitorTest : public ::testing::Test {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
  Monitor monitor_{*system_, setup_of(1, nullptr), StatusPage(), std::make_shared<GroupCell>()};
};

// The engine does not say for which rank it waited.
TEST_F(MonitorTest, AStreamOfAnUnknownPeerEndsForTheReasonThatTheEngineGave) {
  const auto end = monitor_.why_stream_ended(-1, Error(ErrorCode::kPeerLost, "reset"));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->culprit, -1);
  EXPECT_EQ(end->cause, "reset");
}

// The waits in the group end although the investigation has thrown.
TEST_F(MonitorTest, AnInvestigationThatThrowsFailsTheGroup) {
  monitor_.fail_after([]() -> Finding { throw std::bad_alloc(); });
  ASSERT_TRUE(monitor_.has_failed());
  EXPECT_TRUE(monitor_.interrupt().is_raised());
  EXPECT_EQ(monitor_.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(monitor_.error().message(), ::testing::HasSubstr("out of memory"));
}

TEST_F(MonitorTest, TheFirstInvestigationCountsUnlessItDoubtsAndAnotherRankKnows) {
  monitor_.fail_after([&] {
    monitor_.fail({.code = ErrorCode::kPeerLost, .culprit = 0, .cause = "somebody knows"});
    return Finding{{.code = ErrorCode::kTimeout, .cause = "a guess"}, std::chrono::seconds(20)};
  });
  EXPECT_EQ(monitor_.error().code(), ErrorCode::kPeerLost);
  monitor_.fail_after([]() -> Finding { throw std::bad_alloc(); });
  EXPECT_THAT(monitor_.error().message(), ::testing::HasSubstr("somebody knows"));
}

// Makes monitors of the groups {1, 3} and {3, 1, 2} of a job of four ranks, on rank 3.
class LinkedMonitors : public MonitorTest {
 protected:
  std::shared_ptr<Monitor> make(std::string name, std::vector<int> members, int self) {
    MonitorSetup setup = setup_of(static_cast<int>(members.size()), nullptr);
    setup.roster.layout = layout_;
    setup.roster.group = std::move(name);
    setup.roster.members = std::move(members);
    setup.roster.self = self;
    return std::make_shared<Monitor>(*system_, std::move(setup), StatusPage(),
                                     std::make_shared<GroupCell>());
  }

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
  // lost_ranks() contains the rank before the loss itself arrives.
  EXPECT_TRUE(large_->peers()[1].is_gone);
}

TEST_F(LinkedMonitors, TheReporterOfALossIsTheMemberThatFoundItOrElseThisRank) {
  for (const auto& [reporter, expected] : {std::pair(1, 0), {2, 1}, {0, 2}}) {
    const auto group = make("other", {1, 2, 3}, 2);
    group->on_rank_lost({.rank = reporter == 2 ? 1 : 2, .reporter = reporter});
    EXPECT_EQ(group->error().details().reporter, Rank(expected)) << reporter;
  }
}

// Rank 2 found the first failure, but is no member of the small group.
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

// The group {2, 3} learns of the loss of rank 2 through a group that does not contain rank 2, and
// through the notices of that group.
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

// A rank that left one group in an orderly way may still be in the other group, so it is not
// reported as lost there.
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

// If the rank counted as silent, it would be reported at once as the certain culprit of a timeout.
TEST(MonitorOfAJob, ARankThatLeftTheJobWithoutLeavingTheGroupIsNotSilent) {
  PlaneJob job = PlaneJob::on_threads({1, 1});
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    const Deadline soon = context.system.deadline_in(std::chrono::seconds(20));
    const auto plane = job.open(context.system, context.rank);
    job.await_connected(context.system, *plane, context.rank);
    job.meet(context.system, 2, "the start");
    if (context.rank == 0) {
      const auto monitor = std::make_shared<Monitor>(context.system, setup_of(2, plane.get()),
                                                     StatusPage(), std::make_shared<GroupCell>());
      monitor->start();
      await(
          context.system, [&] { return plane->has_left(1); }, soon);
      const PeerView peer = monitor->ask_peers(soon)[1];
      testing::require(!peer.is_silent() && peer.has_ended(), "rank 1 is taken for silent");
      monitor->stop();
    }
    plane->close(soon);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Otherwise rank 1 would believe that rank 0 has left in an orderly way, and would never fail.
TEST(MonitorOfAJob, ARankThatLeavesWhileItsFailureIsInvestigatedPublishesTheFailure) {
  PlaneJob job = PlaneJob::on_threads({1, 1});
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    os::System& system = context.system;
    const Deadline soon = system.deadline_in(std::chrono::seconds(20));
    const auto plane = job.open(system, context.rank);
    job.await_connected(system, *plane, context.rank);
    MonitorSetup setup = setup_of(2, plane.get());
    setup.roster.self = context.rank;
    const auto monitor = std::make_shared<Monitor>(system, std::move(setup), StatusPage(),
                                                   std::make_shared<GroupCell>());
    monitor->start();
    job.meet(system, 2, "the start");
    if (context.rank == 0) {
      std::atomic<bool> has_claimed = false;
      const auto investigator = system.spawn("investigator", [&] {
        monitor->fail_after([&] {
          has_claimed = true;
          system.make_waiter()->park(system.deadline_in(std::chrono::milliseconds(50)));
          return Finding{{.code = ErrorCode::kUnavailable, .culprit = 0, .cause = "the finding"}};
        });
      });
      await(
          system, [&] { return has_claimed.load(); }, soon);
      monitor->publish_leave(0, soon);
      monitor->stop();
      investigator->join();
    } else {
      monitor->await_failure(0, soon);
      testing::require(monitor->has_failed(), "rank 0 left the group in good order");
      testing::require(monitor->error().message().find("the finding") != std::string::npos,
                       "another failure was published");
      monitor->stop();
    }
    job.meet(system, 2, "the end");
    plane->close(soon);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
