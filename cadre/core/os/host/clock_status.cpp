#include "cadre/core/os/host/clock_status.h"

#include <sys/timex.h>
#include <time.h>

#include <algorithm>
#include <array>

namespace cadre::os {
namespace {

constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;

int64_t nanoseconds_of(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return time.tv_sec * kNanosecondsPerSecond + time.tv_nsec;
}

}  // namespace

std::optional<WallClockSync> read_wall_clock_sync() {
  timex status{};  // has no modes, so the call only reads
  const int state = ::adjtimex(&status);
  if (state < 0) return std::nullopt;
  return WallClockSync{.is_synchronized = state != TIME_ERROR && (status.status & STA_UNSYNC) == 0,
                       .max_error = std::chrono::microseconds(status.maxerror)};
}

ClockReading read_clocks() {
  return {.monotonic = TimePoint{nanoseconds_of(CLOCK_MONOTONIC)},
          .wall_ns = nanoseconds_of(CLOCK_REALTIME)};
}

Duration wall_clock_jump(const ClockReading& before, const ClockReading& after) {
  return Duration(after.wall_ns - before.wall_ns) - (after.monotonic - before.monotonic);
}

Duration measure_clock_read() {
  constexpr int64_t kReadsPerSample = 64;
  std::array<int64_t, 15> samples{};
  for (int64_t& sample : samples) {
    const int64_t begin = nanoseconds_of(CLOCK_MONOTONIC);
    for (int64_t read = 1; read < kReadsPerSample; ++read) nanoseconds_of(CLOCK_MONOTONIC);
    sample = (nanoseconds_of(CLOCK_MONOTONIC) - begin) / kReadsPerSample;
  }
  std::ranges::nth_element(samples, samples.begin() + samples.size() / 2);
  return Duration(samples[samples.size() / 2]);
}

}  // namespace cadre::os
