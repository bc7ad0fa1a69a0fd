// The date and time, only for log lines, reports and file names: this clock jumps when someone sets
// it.
//
// Threads: any. Blocking: never.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/export.h"

namespace cadre::os {

// Returns the time in UTC, in ISO 8601 with milliseconds: "2026-11-21T10:04:11.042Z".
CADRE_EXPORT std::string wall_clock_text();

// Returns the text of a time from wall_clock_seconds(), without milliseconds.
std::string wall_clock_text(int64_t seconds);

// Returns the number of seconds since 1970.
int64_t wall_clock_seconds();
int64_t wall_clock_milliseconds();

}  // namespace cadre::os
