// Tests the output of workers under `cadre run`: order, long and unfinished lines, carriage
// returns, and outputs that cannot be written.
#include <fcntl.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include "cadre/core/os/io/fd.h"
#include "cadre/testing/core/cadre_command.h"

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

TEST(RunLines, ALongLineIsNotCutAmongOthers) {
  constexpr size_t kBytes = 1'000'000;
  const auto result = run_cadre(shell_job(
      3, cadre::format("for i in 1 2 3; do head -c {} /dev/zero | tr '\\000' $RANK; echo; done",
                       kBytes)));
  EXPECT_EQ(result.exit_code, 0);
  std::istringstream stream(result.output);
  int num_lines = 0;
  for (std::string line; std::getline(stream, line); ++num_lines) {
    ASSERT_EQ(line.size(), 4 + kBytes) << line.substr(0, 10);
    const char rank = line[1];
    ASSERT_EQ(line.find_first_not_of(rank, 4), std::string::npos) << line.substr(0, 10);
  }
  EXPECT_EQ(num_lines, 9);
}

TEST(RunLines, ALineThatNeverEndsIsPassedOnWhole) {
  constexpr size_t kBytes = 5'000'000;
  const auto result =
      run_cadre(shell_job(1, cadre::format("head -c {} /dev/zero | tr '\\000' x", kBytes)));
  EXPECT_TRUE(result.output == "[0] " + std::string(kBytes, 'x') + "\n")
      << result.output.size() << result.output.substr(0, 20);
}

TEST(RunLines, AnUnfinishedLineIsShownWhileItsWorkerHangs) {
  CadreCommand command(shell_job(1, "printf 'loading shard 7...'; sleep 1000"));
  EXPECT_TRUE(command.wait_for("[0] loading shard 7..."));
}

TEST(RunLines, AnUnfinishedLineBreaksNoOther) {
  // Rank 1 writes only after the launcher has printed the beginning of rank 0's line.
  CadreCommand command(shell_job(2,
                                 "trap 'go=1' USR1; echo up; until [ $go ]; do sleep 0.02; done; "
                                 "if [ $RANK = 1 ]; then echo whole; exit 0; fi; "
                                 "printf half; sleep 1000"));
  ASSERT_TRUE(command.wait_for("[0] up") && command.wait_for("[1] up"));
  command.send(SIGUSR1);
  ASSERT_TRUE(command.wait_for("[0] half") && command.wait_for("[1] whole"));
  command.send(SIGTERM);
  const std::string output = command.wait().output;
  EXPECT_TRUE(output.ends_with("\n[0] half\n[1] whole\n") ||
              output.ends_with("\n[1] whole\n[0] half\n"))
      << output;
}

TEST(RunLines, AnUnfinishedLineGoesOnWhereItWas) {
  const auto result =
      run_cadre(shell_job(1, "printf 'one '; sleep 0.5; printf 'two'; echo ' end'"));
  EXPECT_EQ(result.output, "[0] one two end\n");
}

TEST(RunLines, CarriageReturnsStayInAFileOrPipe) {
  const auto result = run_cadre(shell_job(1, R"(printf '\r10%%\r20%%\r30%%\ndone\r\n')"));
  EXPECT_EQ(result.output, "[0] \r10%\r20%\r30%\n[0] done\r\n");
}

// A pseudo terminal that passes bytes on unchanged.
class PseudoTerminal {
 public:
  PseudoTerminal() : main_(::posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC)) {
    if (!main_.is_open()) throw Error(ErrorCode::kUnavailable, "no pseudoterminal");
    ::grantpt(main_.get());
    ::unlockpt(main_.get());
    name_ = ::ptsname(main_.get());
    held_ = os::Fd(::open(name_.c_str(), O_RDWR | O_NOCTTY | O_CLOEXEC));
    termios settings{};
    ::tcgetattr(held_.get(), &settings);
    ::cfmakeraw(&settings);
    ::tcsetattr(held_.get(), TCSANOW, &settings);
  }

  const std::string& name() const { return name_; }
  std::string take() {
    std::string text;
    std::array<char, 4096> buffer;
    for (ssize_t got = 0; (got = ::read(main_.get(), buffer.data(), buffer.size())) > 0;) {
      text.append(buffer.data(), static_cast<size_t>(got));
    }
    return text;
  }

 private:
  os::Fd main_;
  os::Fd held_;
  std::string name_;
};

TEST(RunLines, OnATerminalALineThatRewritesItselfIsShownOnce) {
  PseudoTerminal terminal;
  CadreCommand command(
      shell_job(1, R"(printf '\r10%%\r20%%\r30%%\ndone\r\n')"),
      {.environment = {{"NO_COLOR", "1"}}, .shell = "exec \"$@\" >" + terminal.name() + " 2>&1"});
  EXPECT_EQ(command.wait().exit_code, 0);
  EXPECT_EQ(terminal.take(), "[0] 30%\n[0] done\n");
}

TEST(RunLines, OnATerminalProgressThatEndsNoLineIsShown) {
  PseudoTerminal terminal;
  CadreCommand command(
      shell_job(1, R"(printf '\r10%%'; sleep 1000)"),
      {.environment = {{"NO_COLOR", "1"}}, .shell = "exec \"$@\" >" + terminal.name()});
  const auto system = os::make_native_system();
  const Deadline deadline = system->deadline_in(kPatience);
  std::string shown;
  while (shown.empty() && !deadline.has_passed(system->now())) {
    system->poll({}, system->deadline_in(std::chrono::milliseconds(20)));
    shown += terminal.take();
  }
  EXPECT_EQ(shown, "[0] 10%\n");
}

TEST(RunLines, OutputThatCannotBeWrittenIsNamedAndAnError) {
  const auto result =
      CadreCommand(shell_job(2, "echo hello"), {.shell = "exec \"$@\" >/dev/full"}).wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error,
            "cadre: standard output: write: No space left on device (errno 28); further output on "
            "it is lost\n");
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

TEST(RunLines, TheReportDoesNotRepeatWhatIsShownAboveIt) {
  const auto result =
      run_cadre(shell_job(1, "echo 'Traceback:' >&2; echo 'ValueError: odd' >&2; exit 1"));
  EXPECT_EQ(count_of(result.error, "ValueError: odd"), 1U) << result.error;
  EXPECT_EQ(masked(result.error),
            "[0] Traceback:\n[0] ValueError: odd\n"
            "cadre: the last 2 lines of rank 0 are shown above\n"
            "cadre: rank 0 of 1 failed with exit code 1 on HOST, pid #, after # s\n");
}

TEST(RunLines, TheReportRepeatsWhatOthersHaveCovered) {
  const auto result = run_cadre(
      shell_job(2,
                "trap 'seq 1 50 >&2; exit 0' TERM; if [ $RANK = 0 ]; then sleep 1; "
                "echo 'ValueError: odd' >&2; exit 1; fi; while true; do sleep 0.05; done"));
  EXPECT_EQ(count_of(result.error, "ValueError: odd"), 2U) << result.error;
}

}  // namespace
}  // namespace cadre::cli
