// Properties of the machine and of this process.
//
// Threads: any. Blocking: never. Errors: Error(kInternal) when /proc cannot be read.
#pragma once

#include <string>

#include "cadre/core/base/export.h"
#include "cadre/core/os/system.h"

namespace cadre::os {

CADRE_EXPORT HostInfo read_host_info();
// Returns a text that only the processes of one running kernel share, in whatever container they
// are.
CADRE_EXPORT const std::string& kernel_boot_id();
// Returns the number of cores that this process may run on (its affinity mask), at least 1.
int num_usable_cores();
// Returns the number of cores of the machine, at least 1.
int num_online_cores();

}  // namespace cadre::os
