// The subcommands of `cadre`, and their common functions.
//
// Threads: the main thread, before any other was started. Blocking: as long as the command runs.
// Each command takes the words after its name and returns the exit code of the process: 0, 1 if its
// output could not be written, 2 for an invalid command line, or a code that its help describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/os/proc/inherited.h"

namespace cadre::cli {

inline constexpr int kUsageExitCode = 2;
inline constexpr int kNotExecutableExitCode = 126;  // the code of shells for this
inline constexpr int kNotFoundExitCode = 127;

// The name of a link to `cadre` that behaves as torchrun.
inline constexpr std::string_view kTorchrunName = "torchrun";

// The word by which `cadre tune` starts its ranks. It is in no help.
inline constexpr std::string_view kTuneWorker = "tune-worker";

using Words = std::span<const std::string>;

// `inherited` has the ignored signals and the limits with which this process was started. Commands
// that start other processes restore them there.
int run_command(Words words, const os::Inherited& inherited);
// Does the same under the name of torchrun: PROGRAM is a Python script unless --no-python is given,
// and lines have no prefix, or torchrun's with --tee.
int torchrun_command(Words words, const os::Inherited& inherited);
int train_command(Words words, const os::Inherited& inherited);
int verify_command(Words words, const os::Inherited& inherited);
int doctor_command(Words words, const os::Inherited& inherited);
int tune_command(Words words, const os::Inherited& inherited);
// Runs a rank of the job that `cadre tune` starts.
int tune_worker_command(Words words);
int info_command(Words words);
int trace_command(Words words);
int schedule_command(Words words);
int stack_command(Words words);

// Prints "cadre run: <sentence>" on standard error; returns `exit_code`.
int fail(std::string_view command, std::string_view sentence, int exit_code);

// Writes the whole text of a command to standard output. Returns 0, or 1 if it could not be written
// (a full disk, a limit on files, a closed descriptor), after a message on standard error. If the
// reader is gone, returns 141 without a message, as if SIGPIPE had ended the command.
int print(std::string_view text);

inline constexpr size_t kTextWidth = 100;  // the width of texts for people

// Returns the sentence in lines of at most kTextWidth bytes, each of which begins with `indent` and
// ends with a newline. A longer word has a line of its own.
std::string wrapped(std::string_view sentence, std::string_view indent);

// Returns for example "1.5 GiB", "64.0 MiB" or "0.5 KiB".
std::string readable_size(uint64_t num_bytes);

}  // namespace cadre::cli
