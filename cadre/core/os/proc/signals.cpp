#include "cadre/core/os/proc/signals.h"

#include <string.h>
#include <sys/signalfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <ranges>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

namespace {

// How often each signal has arrived. A signal handler gets no argument of the program, so it finds
// its state in a static.
constinit std::array<std::atomic<uint32_t>, NSIG> num_arrivals = {};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void count_arrival(int signal) {
  num_arrivals[static_cast<size_t>(signal)].fetch_add(1, std::memory_order_relaxed);
}

uint32_t arrivals_of(int signal) {
  return num_arrivals[static_cast<size_t>(signal)].load(std::memory_order_relaxed);
}

// A handler that returns would repeat the instruction that caused one of the last four forever.
constexpr std::array kNotCountable{SIGKILL, SIGSTOP, SIGSEGV, SIGBUS, SIGFPE, SIGILL};

void check_is_countable(int signal) {
  struct sigaction action {};
  const bool exists = ::sigaction(signal, nullptr, &action) == 0;
  if (exists && std::ranges::find(kNotCountable, signal) == kNotCountable.end()) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("{} (number {}) cannot be handled as a notice; choose another one, for "
                            "example SIGTERM, SIGUSR1 or SIGUSR2",
                            signal_name(signal), signal));
}

bool is_ignored(int signal) {
  struct sigaction action {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

SignalListener::SignalListener(std::span<const int> signals) {
  const sigset_t mask = signals_to_take(signals);
  fd_ = Fd(::signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC));
  if (!fd_.is_open()) throw errno_error(ErrorCode::kUnavailable, "signalfd", errno);
  ::pthread_sigmask(SIG_BLOCK, &mask, &previous_mask_);
}

SignalListener::~SignalListener() {
  ::pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
}

std::optional<int> SignalListener::try_next() {
  signalfd_siginfo info;
  while (true) {
    const ssize_t got = ::read(fd_.get(), &info, sizeof(info));
    if (got == sizeof(info)) return static_cast<int>(info.ssi_signo);
    if (got < 0 && errno == EINTR) continue;
    return std::nullopt;
  }
}

PendingSignal::PendingSignal(std::span<const int> signals) {
  std::ranges::for_each(signals, check_is_countable);
  const sigset_t taken = signals_to_take(signals);
  struct sigaction action = {};
  action.sa_handler = count_arrival;
  action.sa_flags = SA_RESTART;
  ::sigfillset(&action.sa_mask);
  for (const int signal : signals) {
    if (!::sigismember(&taken, signal)) continue;
    Watched& watched =
        watched_.emplace_back(Watched{.number = signal, .num_before = arrivals_of(signal)});
    ::sigaction(signal, &action, &watched.previous);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &taken, &previous_mask_);
}

// Blocks the signals before it restores their handlers, and restores the latter in reverse order,
// because a signal may be listed twice.
PendingSignal::~PendingSignal() {
  if (stays_) return;
  sigset_t blocked;
  ::sigemptyset(&blocked);
  for (const Watched& watched : watched_) {
    if (::sigismember(&previous_mask_, watched.number) == 1) ::sigaddset(&blocked, watched.number);
  }
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  for (const Watched& watched : std::views::reverse(watched_)) {
    ::sigaction(watched.number, &watched.previous, nullptr);
  }
}

bool PendingSignal::has_arrived() const {
  return std::ranges::any_of(watched_, [](const Watched& watched) {
    return arrivals_of(watched.number) != watched.num_before;
  });
}

sigset_t signals_to_take(std::span<const int> signals) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : signals) {
    if ((signal != SIGHUP && signal != SIGTSTP) || !is_ignored(signal)) ::sigaddset(&set, signal);
  }
  return set;
}

std::string signal_name(int signal) {
  const char* abbreviation = ::sigabbrev_np(signal);
  if (abbreviation == nullptr) return cadre::format("signal {}", signal);
  return std::string("SIG") + abbreviation;
}

}  // namespace cadre::os
