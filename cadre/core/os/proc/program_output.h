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

// `arguments[0]` is looked up in PATH. Its standard output comes back (at most 1 MiB); its standard
// error goes where this process's goes.
CADRE_EXPORT Result<std::string> program_output(const std::vector<std::string>& arguments,
                                                Deadline deadline);

}  // namespace cadre::os
