// The time at which a process began. With the pid it identifies the process, also after the pid was
// reused.
//
// Threads: any. Blocking: never; one small file of /proc is read. Errors: none; an unknown time is
// 0.
#pragma once

#include <cstdint>

#include "cadre/core/base/export.h"
#include "cadre/core/fabric/flight/flight_record.h"

namespace cadre {

// Returns the start of the process in the kernel's ticks since the host's boot; 0 if no process
// with this pid lives in the PID namespace of this process. A zombie does not count as alive.
CADRE_EXPORT uint64_t process_start_of(int pid);

// Returns whether the process that wrote a record still lives on this host. A stopped process
// counts as alive. Returns false if this cannot be determined: if the writer ran on another host or
// in another PID namespace, or if the record has no start time.
CADRE_EXPORT bool writer_lives(const FlightIdentity& writer);

}  // namespace cadre
