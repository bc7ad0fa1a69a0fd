// Runs a job under the guardian: what `cadre run` and `cadre train` have in common.
//
// Threads: the main thread, before any other was started. Blocking: as long as the job runs.
// Errors: reported on standard error as one sentence; 126 or 127 when the program cannot be
// started, 2 for a wrong CADRE_LOG, whose level holds for the job's store as for the workers.
#pragma once

#include <functional>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/launch/job.h"

namespace cadre::cli {

inline constexpr int kMaxWorkers = 4096;

// Returns the exit code. `command` begins the sentence of an error ("cadre run"). `meaning`: the
// command's exit code for that of the job; not given: the same.
int launch_job(std::string_view command, launch::JobSpec spec,
               const std::function<int(int)>& meaning = {});

// The exit code for a program that cannot be started for this reason.
int start_failure_code(const Error& error);

}  // namespace cadre::cli
