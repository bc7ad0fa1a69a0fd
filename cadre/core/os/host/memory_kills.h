// How often the kernel has killed a process of this machine for want of memory.
//
// Threads: any. Blocking: never. Source: oom_kill of /proc/vmstat, which anyone may read and which
// counts kills by a container's limit too.
#pragma once

#include <cstdint>

namespace cadre::os {

// Since the machine started; 0 where the kernel does not say.
uint64_t count_memory_kills();

}  // namespace cadre::os
