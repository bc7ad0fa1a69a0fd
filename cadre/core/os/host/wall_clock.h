// The date and time for people, for log lines, reports and file names only: it jumps when someone
// sets it.
//
// Threads: any. Blocking: never.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/export.h"

namespace cadre::os {

// UTC in ISO 8601 with milliseconds: "2026-11-21T10:04:11.042Z".
CADRE_EXPORT std::string wall_clock_text();

// The same of a time that wall_clock_seconds() gave, without milliseconds.
std::string wall_clock_text(int64_t seconds);

// Seconds since 1970.
int64_t wall_clock_seconds();

}  // namespace cadre::os
