// When a process began: with its pid it names the process for good, also after the pid was reused.
//
// Threads: any. Blocking: never (one small file of /proc). Errors: none; 0 for what is not known.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"
#include "cadre/core/fabric/flight/flight_record.h"

namespace cadre {

// In the kernel's ticks since the host's boot. 0 where no such process lives in this process's pid
// namespace; one that has ended and waits to be reaped does not live.
CADRE_EXPORT uint64_t process_start_of(int pid);

// Whether the process that wrote a record lives, on this host: one that is stopped does. False
// where that cannot be known: of another host, another pid namespace or an older record.
CADRE_EXPORT bool writer_lives(const FlightIdentity& writer);

}  // namespace cadre
