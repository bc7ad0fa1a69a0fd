// Finds the functions, files and lines of a crash file in the debug information of the mapped
// files.
//
// Threads: one. Blocking: for the time to read the files. Errors: none; names that are not found
// stay empty. It may allocate as much as the debug information needs, so the launcher runs it in a
// process of its own. Source: libdw of elfutils, as in eu-addr2line.
#pragma once

#include <string>
#include <vector>

#include "cadre/core/wire/crash_file.h"

namespace cadre::cli {

struct SourceFrame {
  std::string function;  // demangled; empty if unknown
  std::string file;      // the source file; empty without debug information
  int line = 0;
  std::string module;  // the executable or library, or the address if there is none

  friend bool operator==(const SourceFrame&, const SourceFrame&) = default;
};

// Returns the calls, innermost first and up to main(). A call that the compiler has inlined is a
// frame of its own.
std::vector<SourceFrame> symbolize(const CrashFile& crash);

// Returns a line for each frame: "#0 f(int) at x.cpp:12", or "#1 g() in /lib/libg.so" without debug
// information and for the C and C++ libraries. Consecutive equal frames, for example of a
// recursion, are combined into one line.
std::string to_text(const std::vector<SourceFrame>& frames);

}  // namespace cadre::cli
