// Tests which failure the Monitor of a group raises, and which state of the peers it reports.
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
#include "cadre/testing/core/monitor_setup.h"
#include "cadre/testing/core/plane_job.h"

namespace cadre {
namespace {

using testing::setup_of;

class MonitorTest : public ::testing::Test {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
  Monitor monitor_{*system_, setup_of(1, nullptr), StatusPage(), std::make_shared<GroupCell>()};
};

// The engine does not report the rank for which it waited. The failure must contain the engine's
// error.
TEST_F(MonitorTest, AStreamOfAnUnknownPeerEndsForTheReasonThatTheEngineGave) {
  const auto end = monitor_.why_stream_ended(-1, Error(ErrorCode::kPeerLost, "reset"));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->culprit, -1);
  EXPECT_EQ(end->cause, "reset");
}

// An investigation that throws must end the waits in the group, too.
TEST_F(MonitorTest, AnInvestigationThatThrowsFailsTheGroup) {
  monitor_.fail_after([]() -> Finding { throw std::bad_alloc(); });
  ASSERT_TRUE(monitor_.has_failed());
  EXPECT_TRUE(monitor_.interrupt().is_raised());
  EXPECT_EQ(monitor_.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(monitor_.error().message(), ::testing::HasSubstr("out of memory"));
}

TEST_F(MonitorTest, TheFirstInvestigationCountsUnlessItDoubtsAndAnotherRankKnows) {
  monitor_.fail_after([&] {
    monitor_.fail({.code = ErrorCode::kPeerLost, .culprit = 0, .cause = "the certain cause"});
    return Finding{{.code = ErrorCode::kTimeout, .cause = "a guess"}, std::chrono::seconds(20)};
  });
  EXPECT_EQ(monitor_.error().code(), ErrorCode::kPeerLost);
  monitor_.fail_after([]() -> Finding { throw std::bad_alloc(); });
  EXPECT_THAT(monitor_.error().message(), ::testing::HasSubstr("the certain cause"));
}

// Rank 1 leaves the job without leaving the group. It must not count as silent, because a silent
// rank would be named at once as the certain culprit of a timeout.
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

// Rank 0 leaves while its failure is investigated, and must publish the failure. Otherwise rank 1
// would believe that rank 0 has left in good order, and would never fail.
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
