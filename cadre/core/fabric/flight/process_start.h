// The time at which a process began. With the pid it identifies the process, also after the pid was
// reused.
//
// Threads: any. Blocking: never (one small file of /proc). Errors: none; 0 for what is not known.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"
#include "cadre/core/fabric/flight/flight_record.h"

namespace cadre {

// Returns the start in the kernel's ticks since the host's boot; 0 if no such process lives in the
// pid namespace of this process. A process that has ended and waits to be reaped does not live.
CADRE_EXPORT uint64_t process_start_of(int pid);

// Returns whether the process that wrote a record lives on this host; a stopped process does. False
// if that cannot be known: for another host, another pid namespace or an older record.
CADRE_EXPORT bool writer_lives(const FlightIdentity& writer);

}  // namespace cadre
