// The template's side of a fork server (fork_server.h): a process with one thread that forks
// workers when the launcher asks.
//
// Threads: the only one of the process. Blocking: serve_fork_requests() as long as the launcher
// lives. Errors: a template that loses its launcher ends.
#pragma once

#include "cadre/core/base/export.h"

namespace cadre::os {

// Returns the number of threads of this process; 0 if /proc cannot be read. A forked child has only
// the thread that has forked, and locks that other threads held stay locked in it, so only a
// process with one thread may fork and go on.
CADRE_EXPORT int count_threads();

// Waits until the child has ended, and reaps it.
void wait_for_end(int child);

// Redirects stdin, stdout and stderr to /dev/null. Otherwise the template would keep the pipes of
// its workers' output, or those of the program, open.
void leave_streams();

// Writes what the streams of C and C++ hold back, so that a forked child does not write it again.
void flush_streams();

// Serves the requests that arrive on the socket `launcher`. Returns only in the forked workers,
// with the worker's environment, output, signals and limits. The template ends with the connection.
void serve_fork_requests(int launcher);

}  // namespace cadre::os
