// What an exit code or a signal means, in words.
//
// Threads: pure functions. Blocking: never.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/os/proc/exit_status.h"

namespace cadre::launch {

// Of `cadre train`, whose ranks report a failure that all of them share once, in one sentence: a
// configuration that cannot be, and whatever else. A report about ranks would say no more.
inline constexpr int kReportedUsageExitCode = 2;
inline constexpr int kReportedFailureExitCode = 3;
// Of `cadre verify`: a strategy deviates, as its table says.
inline constexpr int kReportedDeviationExitCode = 4;

// "exit code 3", "signal 11 (SIGSEGV)".
std::string exit_name(const os::ExitStatus& status);

// A sentence about the likely cause and where to look; empty for codes that only the program can
// explain. `num_oom_kills`: processes that the kernel killed for want of memory during the job.
std::string exit_meaning(const os::ExitStatus& status, uint64_t num_oom_kills);

}  // namespace cadre::launch
