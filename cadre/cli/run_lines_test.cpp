// What `cadre run` makes of the bytes that workers write: their order, long and unfinished lines,
// carriage returns, and outputs that cannot be written.
#include "cadre/cli/cadre_command_test.h"

namespace cadre::cli {
namespace {

constexpr const char* kIntoOnePipe = "exec \"$@\" 2>&1";

TEST(RunLines, BothStreamsOfARankKeepTheirOrderInOnePlace) {
  constexpr int kLines = 3000;
  const auto result =
      CadreCommand(shell_job(1, cadre::format("i=0; while [ $i -lt {} ]; do echo $i; i=$((i + 1)); "
                                              "echo $i >&2; i=$((i + 1)); done",
                                              kLines)),
                   {.shell = kIntoOnePipe})
          .wait();
  EXPECT_EQ(result.exit_code, 0);
  std::string expected;
  for (int i = 0; i < kLines; ++i) expected += cadre::format("[0] {}\n", i);
  EXPECT_EQ(result.output, expected);
}

TEST(RunLines, OutputThatCannotBeWrittenIsNamedAndAnError) {
  const auto result =
      CadreCommand(shell_job(2, "echo hello"), {.shell = "exec \"$@\" >/dev/full"}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error,
            "cadre: standard output: write: No space left on device (errno 28); what follows on it "
            "is lost\n");
  const auto both =
      CadreCommand(shell_job(2, "echo hello"), {.shell = "exec \"$@\" >/dev/full 2>&1"}).wait();
  EXPECT_EQ(both.exit_code, 1);
}

TEST(RunLines, AReaderThatHasGoneIsNoError) {
  const auto result =
      CadreCommand(shell_job(1, "sleep 0.2; echo hello; echo world"), {.shell = "\"$@\" | true"})
          .wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
}

}  // namespace
}  // namespace cadre::cli
