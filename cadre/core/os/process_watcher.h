// What a System of real processes can do and the simulator cannot: see the end of another process.
// Ask for it with a dynamic_cast of the System.
//
// Threads: all methods from any thread. Blocking: never. Lifetime: the System's.
// Errors: none; a process that cannot be watched is null.
#pragma once

#include <cstdint>
#include <memory>

#include "cadre/core/os/socket.h"

namespace cadre::os {

class ProcessWatcher {
 public:
  virtual ~ProcessWatcher() = default;

  // In which the pids of this process count; 0: unknown.
  virtual uint64_t pid_namespace() = 0;
  // Readable once the process has ended, reaped or not. Null where there is none in this process's
  // namespace, and where the system does not allow it (no pidfd_open, or no descriptor left): the
  // caller then relies on the end of a connection.
  virtual std::unique_ptr<Pollable> watch_process(int pid) = 0;
};

}  // namespace cadre::os
