// An interface that reports the end of another process. A System of real processes implements it,
// the simulator does not; use a dynamic_cast of the System to get it.
//
// Threads: all methods from any thread. Blocking: never. Lifetime: that of the System.
// Errors: none; watch_process() returns null for a process that cannot be watched.
#pragma once

#include <cstdint>
#include <memory>

#include "cadre/core/os/socket.h"

namespace cadre::os {

class ProcessWatcher {
 public:
  virtual ~ProcessWatcher() = default;

  // Returns the PID namespace of this process, as a number; 0 if it is unknown.
  virtual uint64_t pid_namespace() = 0;
  // Returns an object that is readable once the process has ended, reaped or not. Returns null if
  // this process's namespace has no such process, or the system does not allow it (no pidfd_open,
  // or no descriptor left): the caller then relies on the end of a connection.
  virtual std::unique_ptr<Pollable> watch_process(int pid) = 0;
};

}  // namespace cadre::os
