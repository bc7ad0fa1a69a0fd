// Runs a short program and returns what it printed.
//
// Threads: any. Blocking: until the program ends, at most until the deadline; then it is killed.
// Lifetime: the program is reaped before the call returns. Errors: kUnavailable with the program's
// name and how it ended; kTimeout.
#pragma once

#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {

// Looks up `arguments[0]` in PATH. Returns the program's standard output (at most 1 MiB); its
// standard error is that of this process.
CADRE_EXPORT Result<std::string> program_output(const std::vector<std::string>& arguments,
                                                Deadline deadline);

}  // namespace cadre::os
