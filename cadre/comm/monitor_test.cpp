// What the monitor of a group says without any connection.
#include "cadre/comm/monitor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <new>
#include <utility>

#include "cadre/os/system.h"

namespace cadre {
namespace {

class MonitorTest : public ::testing::Test {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
  Monitor monitor_{
      *system_,
      MonitorSetup{.roster = {"world",
                              0,
                              std::make_shared<const Layout>(std::vector{wire::RankCard{}}),
                              {0}},
                   .key = 1,
                   .plane = nullptr,
                   .slots = {-1},
                   .record_path = "",
                   .log = nullptr},
      StatusPage(), std::make_shared<GroupCell>()};
};

// An engine that cannot say whose stream ended.
TEST_F(MonitorTest, AStreamOfAnUnknownPeerEndsForTheReasonThatTheEngineGave) {
  const auto end = monitor_.why_stream_ended(-1, Error(ErrorCode::kPeerLost, "reset"));
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->culprit, -1);
  EXPECT_EQ(end->cause, "reset");
}

// The waits of the group end, although nobody could find out why it failed.
TEST_F(MonitorTest, AnInvestigationThatThrowsFailsTheGroup) {
  monitor_.fail_after([]() -> Monitor::Finding { throw std::bad_alloc(); });
  ASSERT_TRUE(monitor_.has_failed());
  EXPECT_TRUE(monitor_.interrupt().is_raised());
  EXPECT_EQ(monitor_.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(monitor_.error().message(), ::testing::HasSubstr("out of memory"));
}

TEST_F(MonitorTest, TheFirstInvestigationCountsUnlessItDoubtsAndAnotherRankKnows) {
  monitor_.fail_after([&] {
    monitor_.fail({.code = ErrorCode::kPeerLost, .culprit = 0, .cause = "somebody knows"});
    return Monitor::Finding{{.code = ErrorCode::kTimeout, .cause = "a guess"},
                            std::chrono::seconds(20)};
  });
  EXPECT_EQ(monitor_.error().code(), ErrorCode::kPeerLost);
  monitor_.fail_after([]() -> Monitor::Finding { throw std::bad_alloc(); });
  EXPECT_THAT(monitor_.error().message(), ::testing::HasSubstr("somebody knows"));
}

}  // namespace
}  // namespace cadre
