// The subcommands of `cadre`, and what they share.
//
// Threads: the main thread, before any other was started. Blocking: as long as the command runs.
// Each command gets the words after its name and returns the process's exit code: 0, 1 when its
// output is lost, 2 for a command line that makes no sense, or what its own page says.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace cadre::cli {

inline constexpr int kUsageExitCode = 2;
inline constexpr int kNotExecutableExitCode = 126;  // as shells have it
inline constexpr int kNotFoundExitCode = 127;

using Words = std::span<const std::string>;

int run_command(Words words);
int train_command(Words words);
int verify_command(Words words);
int info_command(Words words);
int trace_command(Words words);
int schedule_command(Words words);

// "cadre run: <sentence>" on standard error; returns `exit_code`.
int fail(std::string_view command, std::string_view sentence, int exit_code);

// The whole of a command's text for standard output, at once. Returns 0, or 1 when it could not be
// written (a full disk, a closed descriptor), which is then said on standard error.
int print(std::string_view text);

}  // namespace cadre::cli
