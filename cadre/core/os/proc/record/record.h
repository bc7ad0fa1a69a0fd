// Runs a program so that its launcher can report why it failed.
//
// An exception that leaves `program` is written to the file that TORCHELASTIC_ERROR_FILE names, in
// the format of torch.distributed.elastic, and printed on standard error as std::terminate() does;
// record() then returns 1. An exception that ends the process elsewhere (in another thread, in a
// noexcept function) is written, too, before std::terminate() aborts.
// SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT in any thread write the stack of the thread beside
// that file (its name with ".crash" appended), from which `cadre run` reports functions, files and
// lines, and `cadre stack` does for other launchers. The signal then ends the process as without
// record(), with the same exit status and core dump. Without TORCHELASTIC_ERROR_FILE the addresses
// are printed on standard error. Signals for which the program, or a sanitizer, has a handler are
// left alone.
// Threads: call it in main(), after prepare_restart(). Only the thread that calls it has a separate
// stack for signals, so a stack overflow of another thread ends the process without a stack.
// Lifetime: the handlers stay until the process ends, so that they also report the crash of a
// destructor of a static object. Blocking: as long as `program`. Errors: none.
// Source: torch.distributed.elastic.multiprocessing.errors.record and Python's faulthandler.
#pragma once

#include <functional>

#include "cadre/core/base/export.h"

namespace cadre {

// Returns what `program` returns, which is the exit code for main().
CADRE_EXPORT int record(const std::function<int()>& program);

}  // namespace cadre
