// Describes a job by the options of `cadre run`, and runs a job for `cadre run`, `cadre train` and
// `cadre verify`. A second process, the guardian, kills the whole job if the launcher is killed.
//
// Threads: the main thread, before any other was started. Blocking: configure_job() while the
// process manager of a scheduler is asked where the hosts meet; launch_job() as long as the job
// runs. Errors: configure_job() returns kInvalidArgument with one sentence. launch_job() reports on
// standard error, as one sentence; 126 or 127 if the program cannot be started, 2 for an invalid
// CADRE_LOG, whose level applies to the job's store and to the workers.
#pragma once

#include <functional>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/os/proc/inherited.h"
#include "cadre/launch/cli/run_options.h"
#include "cadre/launch/job/job.h"

namespace cadre::cli {

inline constexpr int kMaxWorkers = 4096;

// Returns a job of one worker, without a program, with the environment of this process.
launch::JobSpec make_job(const os::Inherited& inherited);

// Sets everything but the program. `command` ("cadre run") begins the warnings, which are printed
// on standard error. REQUIRES: `spec.environment` is set.
Status configure_job(std::string_view command, const RunOptions& options, launch::JobSpec& spec);

// Runs the job and returns the exit code. `command` begins error messages ("cadre run"). `meaning`
// maps the exit code of the job to that of the command; by default they are equal.
int launch_job(std::string_view command, launch::JobSpec spec,
               const std::function<int(int)>& meaning = {});

// Returns the exit code for a program that cannot be started for this reason.
int start_failure_code(const Error& error);

}  // namespace cadre::cli
