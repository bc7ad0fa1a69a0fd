#include "cadre/core/os/proc/signals.h"

#include <string.h>
#include <sys/signalfd.h>
#include <time.h>

#include <cerrno>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

namespace {

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

PendingSignal::PendingSignal(std::span<const int> signals) : watched_(signals_to_take(signals)) {
  ::pthread_sigmask(SIG_BLOCK, &watched_, &previous_mask_);
}

PendingSignal::~PendingSignal() {
  has_arrived();  // a signal left pending would be delivered when the mask is restored
  ::pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
}

bool PendingSignal::has_arrived() {
  const timespec at_once = {};
  // Each call takes one pending instance, so that a repeated signal is not left behind.
  while (::sigtimedwait(&watched_, nullptr, &at_once) > 0) has_arrived_ = true;
  return has_arrived_;
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
