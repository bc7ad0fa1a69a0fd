// Tests threads that are never joined.
#include "cadre/core/os/native/native_thread.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>

#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::os {
namespace {

// Calls exit() while a detached thread still runs.
[[noreturn]] void exit_while_a_thread_runs() {
  std::promise<void> has_begun;
  run_detached("late", [&has_begun] {
    has_begun.set_value();
    sleep_until(Deadline(monotonic_now() + std::chrono::milliseconds(50)));
    static_cast<void>(::write(STDERR_FILENO, "the thread has ended", 20));
  });
  has_begun.get_future().wait();
  std::exit(0);  // NOLINT(concurrency-mt-unsafe): static objects are destroyed, which is tested
}

TEST(DetachedThread, TheEndOfTheProcessWaitsForIt) {
  EXPECT_EXIT(exit_while_a_thread_runs(), ::testing::ExitedWithCode(0), "the thread has ended");
}

// A static object whose destructor starts a detached thread, after the destructor has run that
// waits for detached threads. exit() must still succeed.
struct StartsThreadAtExit {
  ~StartsThreadAtExit() {
    run_detached("last", [] {});
  }
};

[[noreturn]] void exit_and_start_a_thread() {
  static const StartsThreadAtExit last;
  run_detached("first", [] {});
  std::exit(0);  // NOLINT(concurrency-mt-unsafe)
}

TEST(DetachedThread, MayBeStartedAtTheEndOfTheProcess) {
  EXPECT_EXIT(exit_and_start_a_thread(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace cadre::os
