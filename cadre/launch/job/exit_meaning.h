// Explains exit codes and signals in words.
//
// Threads: pure functions. Blocking: never.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/os/proc/exit_status.h"

namespace cadre::launch {

// The exit codes of `cadre train` when its ranks have reported a common failure in one sentence: an
// invalid configuration, or any other failure. A report about ranks would add nothing.
inline constexpr int kReportedUsageExitCode = 2;
inline constexpr int kReportedFailureExitCode = 3;
// The exit code of `cadre verify` if a strategy deviates.
inline constexpr int kReportedDeviationExitCode = 4;

// Returns "exit code 3" or "signal 11 (SIGSEGV)".
std::string exit_name(const os::ExitStatus& status);

// Returns a sentence about the likely cause and where to look; empty for codes that only the
// program defines. `num_oom_kills` is the number of processes that the kernel killed during the job
// because memory was exhausted.
std::string exit_meaning(const os::ExitStatus& status, uint64_t num_oom_kills);

}  // namespace cadre::launch
