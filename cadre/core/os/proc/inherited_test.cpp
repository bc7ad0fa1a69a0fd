// Tests what a process inherits: dispositions of signals, the size of stacks, standard streams.
#include "cadre/core/os/proc/inherited.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/native/native_thread.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/proc/program_output.h"
#include "cadre/core/os/system.h"

namespace cadre::os {
namespace {

using ::testing::HasSubstr;

constexpr Duration kProgramPatience = std::chrono::seconds(20);

// Ignores SIGCHLD during the lifetime of the object, as in a process whose parent ignored SIGCHLD
// before exec.
class ChildrenIgnored {
 public:
  ChildrenIgnored() : previous_(::signal(SIGCHLD, SIG_IGN)) {}
  ~ChildrenIgnored() { ::signal(SIGCHLD, previous_); }
  ChildrenIgnored(const ChildrenIgnored&) = delete;
  ChildrenIgnored& operator=(const ChildrenIgnored&) = delete;

 private:
  sighandler_t previous_;
};

TEST(Inherited, AnEndThatTheKernelDidNotKeepIsNoSuccess) {
  const ChildrenIgnored ignored;
  const auto system = make_native_system();
  auto process = Process::start({.executable = "/bin/sh", .arguments = {"sh", "-c", "exit 3"}});
  ASSERT_TRUE(process.ok());
  std::array items{PollItem{.target = &(*process)->exit_event(), .want_read = true}};
  ASSERT_TRUE(system->poll(items, system->deadline_in(kProgramPatience)));
  const auto status = (*process)->try_wait();
  ASSERT_TRUE(status);
  EXPECT_FALSE(status->is_known);
  EXPECT_FALSE(status->is_success());
  EXPECT_EQ(status->shell_code(), 1);
}

TEST(Inherited, AProgramWhoseEndIsUnknownIsAnErrorWithTheReason) {
  const ChildrenIgnored ignored;
  const auto system = make_native_system();
  const auto output =
      program_output({"sh", "-c", "echo half; exit 3"}, system->deadline_in(kProgramPatience));
  ASSERT_FALSE(output.ok());
  EXPECT_EQ(output.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(output.error().message(),
              HasSubstr("how sh ended is not known: this process ignores SIGCHLD"));
}

TEST(Inherited, ADescriptorIsNeverAStandardStream) {
  const Fd kept(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 10));
  ASSERT_TRUE(kept.is_open());
  ::close(STDIN_FILENO);
  {
    const Fd opened(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    EXPECT_GT(opened.get(), STDERR_FILENO);
    EXPECT_LT(::fcntl(STDIN_FILENO, F_GETFD), 0);
    EXPECT_EQ(::fcntl(opened.get(), F_GETFD), FD_CLOEXEC);
    const auto pipe = make_pipe();
    EXPECT_TRUE(pipe.ok());
    EXPECT_NE(::fcntl(pipe->read_end.get(), F_GETFL) & O_NONBLOCK, 0);
  }
  ::dup2(kept.get(), STDIN_FILENO);
}

// The default stack size of threads is the RLIMIT_STACK with which the program was started, which
// may be small. A NativeThread must get a large stack all the same.
TEST(Inherited, AThreadHasRoomOnASmallStack) {
  pthread_attr_t before;
  pthread_attr_t small;
  ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
  ::pthread_attr_init(&small);
  ::pthread_attr_setstacksize(&small, 64 << 10);
  ASSERT_EQ(::pthread_setattr_default_np(&small), 0);
  size_t num_bytes = 0;
  {
    NativeThread thread("small", [&] {
      pthread_attr_t own;
      ::pthread_getattr_np(::pthread_self(), &own);
      ::pthread_attr_getstacksize(&own, &num_bytes);
      ::pthread_attr_destroy(&own);
    });
    thread.join();
  }
  ::pthread_setattr_default_np(&before);
  ::pthread_attr_destroy(&small);
  ::pthread_attr_destroy(&before);
  EXPECT_GE(num_bytes, size_t{8} << 20);
}

TEST(Inherited, SignalsThatAreIgnoredAreListed) {
  const auto before = ::signal(SIGUSR2, SIG_IGN);
  EXPECT_THAT(ignored_signals(), ::testing::Contains(SIGUSR2));
  ::signal(SIGUSR2, before);
  EXPECT_THAT(ignored_signals(), ::testing::Not(::testing::Contains(SIGUSR2)));
}

}  // namespace
}  // namespace cadre::os
