// Stop signals at any instant of `cadre run`, and processes that are stopped and continued.
#include "cadre/cli/cadre_command_test.h"
#include "cadre/testing/temporary_folder.h"

namespace cadre::cli {
namespace {

// A signal that comes before the workers, between two steps of the start or after their end.
TEST(RunStop, ASignalAtAnyInstantLeavesNoFileAndNoPuzzle) {
  const cadre::testing::TemporaryFolder temporary;
  const auto system = os::make_native_system();
  constexpr int kLaunches = 60;
  for (int launch = 0; launch < kLaunches; ++launch) {
    CadreCommand command({"run", "--nproc-per-node", "2", "true"},
                         {.environment = {{"TMPDIR", temporary.path()}}});
    system->poll({}, system->deadline_in(std::chrono::microseconds(launch * 500)));
    command.send(SIGTERM);
    const auto result = command.wait();
    EXPECT_TRUE(result.exit_code == 0 || result.exit_code == 128 + SIGTERM) << result.exit_code;
    EXPECT_EQ(result.error.find("launcher's own process"), std::string::npos) << result.error;
    EXPECT_TRUE(command.leaves_nothing());
    ASSERT_TRUE(std::filesystem::is_empty(temporary.path())) << "launch " << launch;
  }
}

}  // namespace
}  // namespace cadre::cli
