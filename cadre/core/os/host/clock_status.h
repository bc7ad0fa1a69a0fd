// The clocks of this host: whether the wall clock is synchronised with other hosts, whether it
// jumps, and what it costs to read the clock that waits use.
//
// Threads: any. Blocking: measure_clock_read() for less than a millisecond; the rest never.
// Errors: none; nullopt if the kernel does not answer, as in some containers.
// Source: adjtimex(2), the status that `timedatectl` shows.
#pragma once

#include <cstdint>
#include <optional>

#include "cadre/core/base/deadline.h"

namespace cadre::os {

struct WallClockSync {
  // The kernel was told within the last hours by a time daemon (NTP, PTP) that the clock is right.
  bool is_synchronized = false;
  Duration max_error{};  // the daemon's bound of the error
};

std::optional<WallClockSync> read_wall_clock_sync();

// Both clocks at one moment.
struct ClockReading {
  TimePoint monotonic;
  int64_t wall_ns = 0;  // time since 1970
};
ClockReading read_clocks();

// Returns by how much the wall clock has advanced more than the monotonic one between two readings.
// A synchronised clock is corrected by at most 0.5 ms in a second; a larger value is a jump.
Duration wall_clock_jump(const ClockReading& before, const ClockReading& after);

// Returns the median cost of reading the monotonic clock.
Duration measure_clock_read();

}  // namespace cadre::os
