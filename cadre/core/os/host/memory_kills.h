// How often the kernel has killed a process of this machine because memory was short.
//
// Threads: any. Blocking: never. Source: oom_kill of /proc/vmstat, which any user may read. It also
// counts kills by a container's limit.
#pragma once

#include <cstdint>

namespace cadre::os {

// Returns the number of kills since the machine started; 0 if the kernel has no such counter.
uint64_t count_memory_kills();

}  // namespace cadre::os
