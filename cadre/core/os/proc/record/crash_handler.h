// Handlers for the signals of a crash, which write a crash file (core/wire/crash_file.h).
//
// Threads: install it from one thread; the handlers run in any. Lifetime: the handlers and their
// memory stay until the process ends. Errors: none; without memory no handler is installed.
#pragma once

#include <string>

namespace cadre::os {

// Installs handlers for those of SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT that have their
// default action, and for std::terminate(). `error_file` is the file for the exception that ends
// the process; the crash file is beside it. If it is empty, the addresses of the stack are printed
// on standard error. Further calls do nothing.
void install_crash_handlers(const std::string& error_file);

}  // namespace cadre::os
