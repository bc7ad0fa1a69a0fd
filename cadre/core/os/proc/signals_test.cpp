#include "cadre/core/os/proc/signals.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <optional>
#include <thread>

namespace cadre::os {
namespace {

constexpr std::array kStopSignals{SIGTERM, SIGINT};

TEST(PendingSignal, RemembersWithoutInterrupting) {
  for (const int number : kStopSignals) {
    PendingSignal signal(kStopSignals);
    EXPECT_FALSE(signal.has_arrived());
    ::kill(::getpid(), number);
    EXPECT_TRUE(signal.has_arrived());
    EXPECT_TRUE(signal.has_arrived());
  }
}

TEST(PendingSignal, LeavesAHangupThatIsIgnored) {
  const auto handler = ::signal(SIGHUP, SIG_IGN);
  PendingSignal signal(std::array{SIGTERM, SIGHUP});
  ::kill(::getpid(), SIGHUP);
  EXPECT_FALSE(signal.has_arrived());
  ::kill(::getpid(), SIGTERM);
  EXPECT_TRUE(signal.has_arrived());
  ::signal(SIGHUP, handler);
}

TEST(PendingSignal, SwallowsWhatCameUnasked) {
  {
    PendingSignal signal(kStopSignals);
    ::kill(::getpid(), SIGTERM);
  }
  PendingSignal next(kStopSignals);
  EXPECT_FALSE(next.has_arrived());
}

// Libraries that a program loads may have threads before main() begins.
TEST(PendingSignal, NoticesASignalThatAnotherThreadGets) {
  std::atomic<bool> is_done = false;
  std::atomic<pid_t> thread_id = 0;
  std::thread other([&] {
    thread_id = ::gettid();
    while (!is_done) std::this_thread::yield();
  });
  while (thread_id == 0) std::this_thread::yield();
  PendingSignal signal(kStopSignals);
  ASSERT_EQ(::tgkill(::getpid(), thread_id, SIGTERM), 0);
  while (!signal.has_arrived()) std::this_thread::yield();
  is_done = true;
  other.join();
}

TEST(PendingSignal, RestoresTheHandlerUnlessItStays) {
  struct sigaction before = {};
  struct sigaction after = {};
  ::sigaction(SIGUSR2, nullptr, &before);
  { PendingSignal signal(std::array{SIGUSR2}); }
  ::sigaction(SIGUSR2, nullptr, &after);
  EXPECT_EQ(after.sa_handler, before.sa_handler);
  {
    PendingSignal signal(std::array{SIGUSR2});
    signal.stay();
  }
  ::raise(SIGUSR2);  // would end this process
  ::sigaction(SIGUSR2, &before, nullptr);
}

// A process may inherit blocked signals.
TEST(PendingSignal, NoticesASignalThatWasBlocked) {
  sigset_t usr1;
  sigset_t now;
  ::sigemptyset(&usr1);
  ::sigaddset(&usr1, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &usr1, nullptr);
  ::raise(SIGUSR1);
  {
    PendingSignal signal(std::array{SIGUSR1, SIGUSR2});
    EXPECT_TRUE(signal.has_arrived());
  }
  ::pthread_sigmask(SIG_UNBLOCK, &usr1, &now);
  EXPECT_EQ(::sigismember(&now, SIGUSR1), 1);
  EXPECT_EQ(::sigismember(&now, SIGUSR2), 0);
}

TEST(PendingSignal, ASignalThatIsListedTwiceHasItsHandlerRestored) {
  struct sigaction before = {};
  struct sigaction after = {};
  ::sigaction(SIGUSR2, nullptr, &before);
  { PendingSignal signal(std::array{SIGUSR2, SIGUSR2}); }
  ::sigaction(SIGUSR2, nullptr, &after);
  EXPECT_EQ(after.sa_handler, before.sa_handler);
}

TEST(PendingSignal, SignalsThatCannotBeCountedAreRefusedBeforeAnyIsHandled) {
  struct sigaction after = {};
  for (const int signal : {0, -1, 65, 1'000'000, SIGKILL, SIGSTOP, SIGSEGV}) {
    EXPECT_THROW(PendingSignal(std::array{SIGUSR2, signal}), Error) << signal;
    ::sigaction(SIGUSR2, nullptr, &after);
    EXPECT_EQ(after.sa_handler, SIG_DFL) << signal;
  }
}

TEST(SignalListener, ReturnsEachSignalThatArrivedOnce) {
  SignalListener listener(kStopSignals);
  EXPECT_EQ(listener.try_next(), std::nullopt);
  ::raise(SIGTERM);
  EXPECT_EQ(listener.try_next(), std::optional<int>(SIGTERM));
  ::raise(SIGINT);
  EXPECT_EQ(listener.try_next(), std::optional<int>(SIGINT));
  EXPECT_EQ(listener.try_next(), std::nullopt);
}

TEST(Signals, AHangupAndAStopAreNotTakenIfTheyAreIgnored) {
  const auto hangup = ::signal(SIGHUP, SIG_IGN);
  const auto stop = ::signal(SIGTSTP, SIG_DFL);
  const auto user = ::signal(SIGUSR1, SIG_IGN);
  const sigset_t taken = signals_to_take(std::array{SIGHUP, SIGTSTP, SIGUSR1});
  ::signal(SIGHUP, hangup);
  ::signal(SIGTSTP, stop);
  ::signal(SIGUSR1, user);
  EXPECT_EQ(::sigismember(&taken, SIGHUP), 0);
  EXPECT_EQ(::sigismember(&taken, SIGTSTP), 1);
  EXPECT_EQ(::sigismember(&taken, SIGUSR1), 1);
  EXPECT_EQ(::sigismember(&taken, SIGTERM), 0);
}

TEST(Signals, HaveNames) {
  EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
  EXPECT_EQ(signal_name(63), "signal 63");
}

}  // namespace
}  // namespace cadre::os
