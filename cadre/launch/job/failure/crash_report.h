// The part of the launcher's report about a worker that crashed under cadre::record(): the signal
// and the stack.
//
// Threads: one. Blocking: at most kStackTimeout for the process that reads the debug information.
// Errors: none. Without a crash file there is no report. If the debug information cannot be read,
// the stack has addresses instead of functions.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/proc/environment.h"
#include "cadre/core/os/system.h"

namespace cadre::launch {

inline constexpr Duration kStackTimeout = std::chrono::seconds(20);

struct CrashReport {
  std::string summary;             // "SIGSEGV at address 0x10 in f(int) at x.cpp:12"
  std::vector<std::string> stack;  // a line for each call, innermost first
};

// Reads the crash file beside a worker's error file. `cadre` is the path of the command, which is
// executed with this environment as `cadre stack`. Returns nullopt if there is no valid crash file.
std::optional<CrashReport> read_crash(os::System& system, const std::string& error_file,
                                      const std::string& cadre, const os::Environment& environment);

// Adds the stack to the worker's error file, and the summary if the worker wrote no exception.
Status add_crash(const std::string& error_file, const CrashReport& report);

// Returns whether the path is that of the C or C++ library, which is rarely the cause of a crash.
bool is_runtime_library(std::string_view path);

// Returns the line of the stack for the summary, without its number. First skips the innermost
// frames of the C and C++ libraries and of the handler of std::terminate(). Returns the innermost
// remaining frame with a source file, or else the innermost one.
std::string place_of(const std::vector<std::string>& stack);

}  // namespace cadre::launch
