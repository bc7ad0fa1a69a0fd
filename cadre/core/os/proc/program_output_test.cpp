#include "cadre/core/os/proc/program_output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

class ProgramOutput : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(std::chrono::seconds(10)); }

  std::unique_ptr<System> system_ = make_native_system();
};

TEST_F(ProgramOutput, ComesBackWhole) {
  const auto output = program_output({"sh", "-c", "printf 'a b\\n'; printf c"}, soon());
  ASSERT_TRUE(output.ok()) << output.error().message();
  EXPECT_EQ(*output, "a b\nc");
}

TEST_F(ProgramOutput, SaysHowTheProgramFailed) {
  EXPECT_EQ(program_output({"sh", "-c", "exit 3"}, soon()).error().message(),
            "sh ended with exit code 3");
  EXPECT_EQ(program_output({"sh", "-c", "kill -9 $$"}, soon()).error().message(),
            "sh was ended by signal 9");
  EXPECT_THAT(program_output({"no-such-program"}, soon()).error().message(),
              ::testing::HasSubstr("run no-such-program"));
}

TEST_F(ProgramOutput, KillsWhatDoesNotEnd) {
  const auto output =
      program_output({"sleep", "60"}, system_->deadline_in(std::chrono::milliseconds(50)));
  ASSERT_FALSE(output.ok());
  EXPECT_EQ(output.error().code(), ErrorCode::kTimeout);
}

// A program that closes its output and continues to run must be killed at the deadline.
TEST_F(ProgramOutput, KillsWhatHasClosedItsOutputAndDoesNotEnd) {
  const TimePoint begin = system_->now();
  const auto output = program_output({"sh", "-c", "echo said; exec >&-; exec sleep 20"},
                                     system_->deadline_in(std::chrono::milliseconds(300)));
  ASSERT_FALSE(output.ok());
  EXPECT_EQ(output.error().code(), ErrorCode::kTimeout);
  EXPECT_LT(system_->now() - begin, std::chrono::seconds(10));
}

}  // namespace
}  // namespace cadre::os
