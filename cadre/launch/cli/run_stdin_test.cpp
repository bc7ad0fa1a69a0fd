// Tests the worker that reads the standard input of `cadre run`.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/proc/exit_status.h"
#include "cadre/testing/core/cadre_command.h"

namespace cadre::cli {
namespace {

using ::testing::HasSubstr;

constexpr const char* kReadAll = "while read line; do echo got $line; done; echo end";

TEST(RunStdin, OneRankReadsThePipeAndTheOthersNothing) {
  const auto result =
      CadreCommand({"run", "--nproc-per-node", "2", "--stdin", "1", "sh", "-c", kReadAll},
                   {.shell = "printf 'a\\nb\\n' | \"$@\""})
          .wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[0] end\n"));
  EXPECT_THAT(result.output, HasSubstr("[1] got a\n[1] got b\n[1] end\n"));
  EXPECT_EQ(result.output.find("[0] got"), std::string::npos);
}

TEST(RunStdin, ARestartedRankReadsTheRest) {
  const auto result =
      CadreCommand({"run", "--stdin", "0", "--max-restarts", "1", "sh", "-c",
                    "read line; echo got $line; exit $((1 - TORCHELASTIC_RESTART_COUNT))"},
                   {.shell = "printf 'a\\nb\\n' | \"$@\""})
          .wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output, HasSubstr("[0] got a\n"));
  EXPECT_THAT(result.output, HasSubstr("[0] got b\n"));
}

TEST(RunStdin, ARankThatDoesNotExistIsRefused) {
  const auto result = run_cadre({"run", "--stdin", "1", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.error, "cadre run: --stdin: there is no local rank 1; this host has 1 worker\n");
}

// `cadre run` in the foreground of a terminal of its own.
class TerminalJob {
 public:
  enum class Control { kForeground, kNone };

  explicit TerminalJob(std::vector<std::string> words, Control control = Control::kForeground) {
    std::string program = testing::build_path("bin/cadre");
    std::vector<char*> arguments{program.data()};
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    int master = -1;
    pid_ = ::forkpty(&master, nullptr, nullptr, nullptr);
    if (pid_ == 0) {
      if (control == Control::kNone) leave_terminal_control();
      ::execv(program.c_str(), arguments.data());
      ::_exit(127);
    }
    master_ = os::Fd(master);
  }
  // Ends a job for which a failed test has not waited.
  ~TerminalJob() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    os::reap(pid_);
  }
  TerminalJob(const TerminalJob&) = delete;
  TerminalJob& operator=(const TerminalJob&) = delete;

  void type(std::string_view text) {
    ASSERT_EQ(::write(master_.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  // Waits until the terminal shows the text.
  bool shows(std::string_view text) {
    while (screen_.find(text) == std::string::npos) {
      pollfd item{master_.get(), POLLIN, 0};
      std::array<char, 4096> bytes{};
      if (::poll(&item, 1, 60'000) <= 0) return false;
      const ssize_t got = ::read(master_.get(), bytes.data(), bytes.size());
      if (got <= 0) return false;
      screen_.append(bytes.data(), static_cast<size_t>(got));
    }
    return true;
  }
  int wait() { return os::reap(std::exchange(pid_, 0)).shell_code(); }
  const std::string& screen() const { return screen_; }

 private:
  // Keeps the terminal open and has no controlling terminal, as after setsid(1).
  static void leave_terminal_control() {
    ::signal(SIGHUP, SIG_IGN);  // the kernel sends it to the leader's group
    ::ioctl(STDIN_FILENO, TIOCNOTTY);
    ::signal(SIGHUP, SIG_DFL);
  }

  int pid_ = 0;
  os::Fd master_;
  std::string screen_;
};

TEST(RunStdin, OneRankReadsTheTerminalUpToItsEnd) {
  TerminalJob job({"run", "--nproc-per-node", "2", "--stdin", "1", "sh", "-c",
                   "printf 'name? '; while read line; do echo got $line; done; echo end"});
  ASSERT_TRUE(job.shows("name? ")) << job.screen();
  job.type("first\n");
  ASSERT_TRUE(job.shows("got first")) << job.screen();
  job.type("second\n");
  ASSERT_TRUE(job.shows("got second")) << job.screen();
  job.type("\x04");
  EXPECT_FALSE(job.shows("never")) << job.screen();  // reads up to the end
  EXPECT_EQ(job.wait(), 0) << job.screen();
}

TEST(RunStdin, ATerminalThatDoesNotControlTheJobIsReadToo) {
  TerminalJob job({"run", "--stdin", "0", "sh", "-c", "echo up; read line; echo got $line"},
                  TerminalJob::Control::kNone);
  ASSERT_TRUE(job.shows("up")) << job.screen();
  job.type("words\n");
  ASSERT_TRUE(job.shows("got words")) << job.screen();
  EXPECT_FALSE(job.shows("never"));
  EXPECT_EQ(job.wait(), 0) << job.screen();
}

TEST(RunStdin, CtrlCInTheTerminalStopsTheJob) {
  TerminalJob job({"run", "--stdin", "0", "sh", "-c", "echo up; read line"});
  ASSERT_TRUE(job.shows("up")) << job.screen();
  job.type("\x03");
  ASSERT_TRUE(job.shows("SIGINT: asked 1 worker to stop")) << job.screen();
  EXPECT_FALSE(job.shows("never"));
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.screen();
}

}  // namespace
}  // namespace cadre::cli
