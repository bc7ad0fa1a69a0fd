// Makes restarts of a program by `cadre run --max-restarts` fast.
//
// In rank 0 the call forks a process, the template, which waits with the program and its libraries
// loaded. After a failure the launcher forks the workers of the next attempt from it. In each of
// them the call returns, with the worker's environment, and main() continues. The
// workers are started with exec, as usual, if there is no template: if the program has other
// threads at the call, is started by a script, or has ${local_rank} in its arguments.
// Call it first in main(), from the only thread: what the program has computed, opened or read from
// the environment before the call is the same in all workers of a restart as in rank 0. Without
// `cadre run --max-restarts` it does nothing.
// Blocking: milliseconds, in rank 0 of the first attempt. Errors: none.
#pragma once

#include "cadre/core/base/export.h"

namespace cadre {

CADRE_EXPORT void prepare_restart();

}  // namespace cadre
