#include "cadre/launch/job/exit_meaning.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <utility>
#include <vector>

namespace cadre::launch {
namespace {

TEST(ExitMeaning, NamesCodesAndSignals) {
  EXPECT_EQ(exit_name({.code = 3}), "exit code 3");
  EXPECT_EQ(exit_name({.signal = SIGABRT}), "signal 6 (SIGABRT)");
  EXPECT_EQ(exit_meaning({.code = 1}, 0), "");
  EXPECT_EQ(exit_meaning({.signal = SIGSEGV}, 0), "invalid memory access");
  EXPECT_NE(exit_meaning({.code = 127}, 0).find("not found"), std::string::npos);
  EXPECT_NE(exit_meaning({.code = 137}, 0).find("SIGKILL"), std::string::npos);
}

TEST(ExitMeaning, EveryCodeAndSignalHasItsOwn) {
  const std::vector<std::pair<os::ExitStatus, std::string>> words = {
      {{.signal = SIGSEGV}, "invalid memory access"},
      {{.signal = SIGBUS}, "a mapped file that shrank"},
      {{.signal = SIGFPE}, "integer division"},
      {{.signal = SIGILL}, "an instruction that this processor does not have"},
      {{.signal = SIGABRT}, "an uncaught C++ exception"},
      {{.signal = SIGKILL}, "killed from outside"},
      {{.signal = SIGTERM}, "asked to end"},
      {{.signal = SIGPIPE}, "a pipe or socket that nobody reads"},
      {{.signal = SIGXCPU}, "ulimit -t"},
      {{.signal = SIGXFSZ}, "ulimit -f"},
      {{.signal = SIGSYS}, "a system call"},
      {{.code = 126}, "cannot be executed"},
      {{.code = 127}, "not found"},
      {{.code = 128 + SIGKILL}, "(SIGKILL): killed from outside"},
      {{.code = 128 + SIGSEGV}, "(SIGSEGV)"},
      {{.code = 128 + SIGABRT}, "(SIGABRT)"}};
  for (const auto& [status, word] : words) {
    EXPECT_NE(exit_meaning(status, 0).find(word), std::string::npos) << word;
  }
  for (const os::ExitStatus& status :
       {os::ExitStatus{.code = 0}, {.code = 2}, {.signal = SIGHUP}}) {
    EXPECT_EQ(exit_meaning(status, 3), "");
  }
  EXPECT_NE(exit_meaning({.signal = SIGKILL}, 1).find("killed 1 process of"), std::string::npos);
  EXPECT_NE(exit_meaning({.code = 128 + SIGKILL}, 2).find("killed 2 processes of"),
            std::string::npos);
}

}  // namespace
}  // namespace cadre::launch
