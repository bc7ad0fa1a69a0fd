// Records the operations on deferred tensors. It is a kernel that libtorch's dispatcher calls for
// each operation on a deferred tensor and, inside a DeferredScope, for each operation that creates
// a tensor.
//
// Threads: any; each thread has its own scopes. Errors: kInvalidArgument for an operation that
// cannot be recorded.
#pragma once

#include <memory>

#include "cadre/parallel/deferred/tape.h"

namespace cadre {

// Registers the recorder with libtorch's dispatcher, once in a process. Later calls do nothing.
void install_recorder();

// Returns the tape (the list of recorded operations) of this thread's innermost DeferredScope; null
// if the thread is in no scope.
std::shared_ptr<Tape>& tape_of_scope();

}  // namespace cadre
