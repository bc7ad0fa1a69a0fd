#include "cadre/launch/cli/launch_job.h"

#include <gtest/gtest.h>

#include <utility>

#include "cadre/launch/cli/command.h"

namespace cadre::cli {
namespace {

TEST(LaunchJob, AProgramThatCannotBeStartedHasTheExitCodeOfAShell) {
  EXPECT_EQ(start_failure_code(Error(ErrorCode::kUnavailable, "there is none")), 127);
  EXPECT_EQ(start_failure_code(Error(ErrorCode::kInvalidArgument, "no program")), 126);
}

// The error must be reported before any process is started.
TEST(LaunchJob, AnInvalidLevelOfTheLogIsAMistakeInTheCommandLine) {
  launch::JobSpec spec;
  spec.environment.set("CADRE_LOG", "loud");
  EXPECT_EQ(launch_job("cadre run", std::move(spec)), kUsageExitCode);
}

}  // namespace
}  // namespace cadre::cli
