// Two processes that watch each other, so that after kill -9 of either no process is left over.
//
// run_guarded() forks. The process that the user started becomes the *guardian*: it forwards
// signals and waits. The child, the *supervisor*, runs the body. Both are subreapers:
// - if the guardian is killed, the supervisor sees the end of a pipe and kills its descendants;
// - if the supervisor is killed, its descendants become the guardian's, which kills them all.
// The supervisor leads a process group of its own, so Ctrl-C gives it one signal, from the
// guardian. Ctrl-Z (SIGTSTP) is forwarded too, and the guardian stops; when it is continued, it
// sends SIGCONT to the supervisor.
// A signal that arrives after the body has ended changes nothing: the exit code is the body's.
// A terminal sends its input to the guardian's process group only, so the guardian can pass it on.
//
// Threads: call it before the process starts any thread. Blocking: as long as the body runs.
// Errors: throws Error(kUnavailable) when the machine has no process or descriptor left.
#pragma once

#include <functional>

#include "cadre/core/os/socket.h"

namespace cadre::os {

// Blocks the signals that the guardian forwards until this process ends. Call it before making
// anything that must be removed at the end: until the call such a signal ends the process at once.
void hold_forwarded_signals();

struct GuardOptions {
  // If standard input is a terminal, standard input of the supervisor becomes a pipe to which the
  // guardian writes what it reads from the terminal, while it is in the foreground.
  bool passes_terminal = false;
};

// Calls hold_forwarded_signals(). Returns in both processes, and each ends with the returned code:
// in the supervisor the body's result; in the guardian the same number, or 128 + signal if the
// supervisor was killed. The body gets a Pollable that becomes readable when the guardian has
// ended.
int run_guarded(const std::function<int(Pollable& guardian_gone)>& body,
                const GuardOptions& options = {});

}  // namespace cadre::os
