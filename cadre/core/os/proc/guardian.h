// Two processes that watch each other, so that kill -9 of either leaves nothing behind.
//
// run_guarded() forks. The process that the user started becomes the *guardian*: it forwards
// signals and waits. The child, the *supervisor*, runs the body. Both are subreapers:
//   - guardian killed: the supervisor sees the end of a pipe and kills everything below it;
//   - supervisor killed: every process below it becomes the guardian's, which kills them all.
// The supervisor leads a process group of its own, so one Ctrl-C is one signal, from the guardian.
// Ctrl-Z (SIGTSTP) is forwarded too, and the guardian stops; when it is continued, it sends the
// supervisor SIGCONT.
// A signal that arrives after the body has ended changes nothing: the exit code is the body's.
//
// Threads: call it before the process starts any. Blocking: as long as the body runs.
// Errors: throws Error(kUnavailable) when the machine has no process or descriptor left.
#pragma once

#include <functional>

#include "cadre/core/os/socket.h"

namespace cadre::os {

// Blocks the signals that the guardian forwards until this process ends. To be called before
// anything is made that has to be removed at the end; until then such a signal ends the process at
// once.
void hold_forwarded_signals();

// Holds the signals as above. Returns in both processes, and both end with what it returns: in the
// supervisor the body's result; in the guardian the same number, or 128 + signal when the
// supervisor was killed. The body is given a Pollable that becomes readable when the guardian is
// gone.
int run_guarded(const std::function<int(Pollable& guardian_gone)>& body);

}  // namespace cadre::os
