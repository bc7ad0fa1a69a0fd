// Describes what run_job() would start, for --dry-run.
//
// Threads: pure function, except that it reads the number of cores. Blocking: never.
#pragma once

#include <string>

#include "cadre/launch/job/job.h"

namespace cadre::launch {

// Returns lines with the program, its arguments, the folder of the log files, and the variables
// that the launcher adds for all workers and for each. "<...>" stands for a value that is known
// only when the job starts, and for its secret.
std::string dry_run_text(const JobSpec& spec);

}  // namespace cadre::launch
