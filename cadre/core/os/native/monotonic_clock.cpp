#include "cadre/core/os/native/monotonic_clock.h"

#include <cerrno>

namespace cadre::os {
namespace {

constexpr int64_t kNsPerSecond = 1'000'000'000;

}  // namespace

TimePoint monotonic_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return {static_cast<int64_t>(now.tv_sec) * kNsPerSecond + now.tv_nsec};
}

timespec to_timespec(Duration duration) {
  return {static_cast<time_t>(duration.count() / kNsPerSecond),
          static_cast<long>(duration.count() % kNsPerSecond)};
}

void sleep_until(Deadline deadline) {
  const timespec at = to_timespec(Duration(deadline.at().ns));
  while (::clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
}

}  // namespace cadre::os
