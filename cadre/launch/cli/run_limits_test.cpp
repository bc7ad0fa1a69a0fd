// Tests `cadre run` under a low limit on open file descriptors.
#include <sys/resource.h>

#include "cadre/testing/core/cadre_command.h"

namespace cadre::cli {
namespace {

CommandResult run_in_shell(std::string shell, std::vector<std::string> words) {
  return CadreCommand(std::move(words), {.shell = std::move(shell)}).wait();
}

TEST(RunLimits, ALowSoftLimitOfDescriptorsIsRaisedForTheLauncherAlone) {
  const auto result =
      run_in_shell("ulimit -Sn 40; exec \"$@\"", shell_job(30, "echo soft $(ulimit -Sn)"));
  EXPECT_EQ(result.exit_code, 0) << result.error;
  for (int rank = 0; rank < 30; ++rank) {
    EXPECT_NE(result.output.find(cadre::format("[{}] soft 40\n", rank)), std::string::npos)
        << result.output;
  }
}

TEST(RunLimits, TooLowAHardLimitIsNamedWithItsRemedyBeforeAnythingStarts) {
  const auto result = run_in_shell("ulimit -n 40; exec \"$@\"", shell_job(30, "echo started"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.error,
            "cadre run: 30 workers need about 144 descriptors and this process may open 40: raise "
            "the hard limit (ulimit -Hn, LimitNOFILE= of systemd) or start fewer workers\n");
}

}  // namespace
}  // namespace cadre::cli
