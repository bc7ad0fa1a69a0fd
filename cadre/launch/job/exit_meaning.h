// Explains exit codes and signals in words.
//
// Threads: pure functions. Blocking: never.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cadre/core/os/proc/exit_status.h"

namespace cadre::launch {

// The exit codes of `cadre train` if its ranks have already reported the error: 2 for an invalid
// configuration, 3 for any other failure. The launcher then prints no report about the failed rank.
inline constexpr int kReportedUsageExitCode = 2;
inline constexpr int kReportedFailureExitCode = 3;
// The exit code of the trainer in `cadre verify` if a strategy's results deviate from those of one
// process.
inline constexpr int kReportedDeviationExitCode = 4;

// Returns whether a process exited, not by a signal, with one of these codes.
bool exited_with_one_of(std::span<const int> codes, const os::ExitStatus& status);

// Returns "exit code 3" or "signal 11 (SIGSEGV)".
std::string exit_name(const os::ExitStatus& status);

// Returns a sentence about the likely cause and where to look; empty for codes that only the
// program defines. `num_oom_kills` is the number of processes that the kernel killed during the job
// because memory was exhausted.
std::string exit_meaning(const os::ExitStatus& status, uint64_t num_oom_kills);

}  // namespace cadre::launch
