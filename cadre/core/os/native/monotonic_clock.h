// CLOCK_MONOTONIC: the time of the native System, common to all processes of a host.
//
// Threads: any. Blocking: sleep_until, until its Deadline.
#pragma once

#include <time.h>

#include "cadre/core/base/deadline.h"

namespace cadre::os {

TimePoint monotonic_now();
timespec to_timespec(Duration duration);
// Sleeps until the deadline. Use it only if the kernel offers no event to wait for.
void sleep_until(Deadline deadline);

}  // namespace cadre::os
