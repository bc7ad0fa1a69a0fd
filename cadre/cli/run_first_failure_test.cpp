// Which rank `cadre run` reports when one fails and the others fail because of it, and end before.
#include <gmock/gmock.h>

#include <stdexcept>

#include "cadre/cli/cadre_command_test.h"
#include "cadre/comm/connect.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;

constexpr int kThrower = 1;

// The test below starts this test as its workers; run directly it is a group of one.
TEST(RunFirstFailureWorker, Throws) {
  const auto system = os::make_native_system();
  Rank rank = 0;
  try {
    const auto group = connect_from_environment(*system, {}, system->deadline_in(kPatience));
    rank = group->rank();
    group->barrier();
    if (rank == kThrower) throw std::runtime_error("the label is out of range");
    group->barrier();
  } catch (const std::exception& error) {
    // The others have ended by then.
    if (rank == kThrower) system->poll({}, system->deadline_in(std::chrono::milliseconds(300)));
    ADD_FAILURE() << error.what();
  }
}

TEST(RunFirstFailure, IsTheRankThatTheOthersName) {
  const auto result = run_cadre({"run", "--nproc-per-node", "3", "--no-python",
                                 std::filesystem::read_symlink("/proc/self/exe").string(),
                                 "--gtest_filter=RunFirstFailureWorker.Throws"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("cadre: rank 1 of 3 failed with exit code 1"));
}

}  // namespace
}  // namespace cadre::cli
