// Asks the process manager that has started this process on which host its process 0 runs. mpirun
// and mpiexec set no variable for that.
//
// Threads: one caller; PMIx runs a thread of its own during the call. Blocking: until all processes
// of the manager have asked, at most until the Deadline; PMIx has no deadline for its connection
// to the local server. Lifetime: plain values. Errors: kUnavailable with the manager's answer.
// Sources: the PMIx 4 standard, sections 5.1 and 6.1; PMI-1 as Hydra of MPICH 4.0 speaks it.
#pragma once

#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/proc/environment.h"

namespace cadre::cli {

// The same values in all processes of one manager.
struct ManagedJob {
  std::string id;          // the manager's name of the job
  std::string first_host;  // the name of the host of process 0
  os::Secret secret;       // known to the processes of the job; empty if the manager has none
};

// Whether the variables of a process manager that can be asked are set.
bool has_process_manager(const os::Environment& environment);

// `own_host` is the name of this host; the process with PMI_RANK 0 gives it to the others.
// REQUIRES: has_process_manager().
Result<ManagedJob> ask_process_manager(const os::Environment& environment,
                                       const std::string& own_host, Deadline deadline);

}  // namespace cadre::cli
