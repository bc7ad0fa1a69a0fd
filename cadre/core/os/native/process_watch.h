// The end of another process, not only of a child, as an object to poll: see os/process_watcher.h.
//
// Threads: one owner at a time. Blocking: never. Lifetime: holds a descriptor; the process may have
// ended and been reaped meanwhile. Errors: none.
#pragma once

#include <cstdint>
#include <memory>

#include "cadre/core/os/socket.h"

namespace cadre::os {

uint64_t read_pid_namespace();
std::unique_ptr<Pollable> open_process_watch(int pid);

}  // namespace cadre::os
