#include "cadre/core/os/proc/inherited.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <cstddef>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/proc/output_stream.h"

namespace cadre::os {
namespace {

constexpr rlim_t kWantedStackBytes = rlim_t{8} << 20;
// This is twice the stack that the launcher's deepest calls need.
constexpr size_t kNeededStackBytes = size_t{32} << 10;

rlimit limit_on(__rlimit_resource_t resource) {
  rlimit limit{};
  ::getrlimit(resource, &limit);
  return limit;
}

// Returns the limit before it was raised; nullopt if it was not raised.
std::optional<uint64_t> raise_stack_limit() {
  const rlimit before = limit_on(RLIMIT_STACK);
  if (before.rlim_cur >= kWantedStackBytes) return std::nullopt;
  const rlimit raised = {.rlim_cur = std::min(kWantedStackBytes, before.rlim_max),
                         .rlim_max = before.rlim_max};
  if (::setrlimit(RLIMIT_STACK, &raised) != 0) return std::nullopt;
  return before.rlim_cur;
}

// Returns the bytes below the present frame, within the limit: a large environment uses stack, too.
size_t remaining_stack_bytes() {
  pthread_attr_t attributes;
  if (::pthread_getattr_np(::pthread_self(), &attributes) != 0) return kNeededStackBytes;
  void* lowest = nullptr;
  size_t num_bytes = 0;
  ::pthread_attr_getstack(&attributes, &lowest, &num_bytes);
  ::pthread_attr_destroy(&attributes);
  const auto* here = static_cast<const std::byte*>(__builtin_frame_address(0));
  return static_cast<size_t>(here - static_cast<const std::byte*>(lowest));
}

void check_stack() {
  const size_t remaining = remaining_stack_bytes();
  if (remaining >= kNeededStackBytes) return;
  throw Error(
      ErrorCode::kUnavailable,
      cadre::format("{} bytes of the stack are free (its limit is {} bytes with the arguments "
                    "and the environment), and {} are needed: raise the limit "
                    "(ulimit -s, LimitSTACK= of systemd)",
                    remaining, limit_on(RLIMIT_STACK).rlim_cur, kNeededStackBytes));
}

}  // namespace

std::vector<int> ignored_signals() {
  std::vector<int> signals;
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) {
      signals.push_back(signal);
    }
  }
  return signals;
}

Inherited take_over_process() {
  fill_closed_streams();
  Inherited inherited = {.ignored_signals = ignored_signals(),
                         .limits = {.stack_bytes = raise_stack_limit()}};
  check_stack();
  struct sigaction standard {};  // also clears SA_NOCLDWAIT
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &standard, nullptr);
  for (const int signal : {SIGPIPE, SIGTTOU, SIGXFSZ}) ::signal(signal, SIG_IGN);
  return inherited;
}

sigset_t set_of_signals(const std::vector<int>& signals) {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : signals) ::sigaddset(&set, signal);
  return set;
}

void set_child_signals(const sigset_t& ignored) {
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    // The call fails for SIGKILL, SIGSTOP and the two signals that belong to glibc.
    ::signal(signal, ::sigismember(&ignored, signal) == 1 ? SIG_IGN : SIG_DFL);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

std::vector<LimitChange> changes_to(const SoftLimits& limits) {
  std::vector<LimitChange> changes;
  const auto add = [&](__rlimit_resource_t resource, std::optional<uint64_t> soft) {
    if (!soft) return;
    changes.push_back({resource, {.rlim_cur = *soft, .rlim_max = limit_on(resource).rlim_max}});
  };
  add(RLIMIT_NOFILE, limits.descriptors);
  add(RLIMIT_STACK, limits.stack_bytes);
  return changes;
}

CoreMask::CoreMask(const std::vector<int>& cores) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  for (const int core : cores) {
    const auto bit = static_cast<size_t>(core);
    if (bits_.size() <= bit / kBits) bits_.resize(bit / kBits + 1);
    bits_[bit / kBits] |= 1UL << bit % kBits;
  }
}

bool CoreMask::apply() const {
  return bits_.empty() ||
         ::sched_setaffinity(0, bits_.size() * sizeof(unsigned long),
                             reinterpret_cast<const cpu_set_t*>(bits_.data())) == 0;
}

}  // namespace cadre::os
