// What the monitor of a group says without any connection.
#include "cadre/comm/monitor.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "cadre/os/system.h"

namespace cadre {
namespace {

// An engine that cannot say whose stream ended.
TEST(MonitorTest, AStreamOfAnUnknownPeerEndsForTheReasonThatTheEngineGave) {
  const auto system = os::make_native_system();
  os::Interrupt interrupt(*system);
  MonitorSetup setup{
      .roster = {"world", 0, {wire::RankCard{}}}, .slots = {-1}, .log = null_log_sink()};
  setup.control.resize(1);
  Monitor monitor(*system, interrupt, std::move(setup));
  EXPECT_EQ(monitor.why_stream_ended(-1, Error(ErrorCode::kPeerLost, "reset")), "reset");
}

}  // namespace
}  // namespace cadre
