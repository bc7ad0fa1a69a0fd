// Records the operations on deferred tensors: the kernel that libtorch's dispatcher calls for each
// operation on one, and, inside a DeferredScope, for each operation that creates a tensor.
//
// Threads: any; the scope is one of the calling thread. Blocking: never. Errors: kInvalidArgument.
#pragma once

#include <memory>

#include "cadre/parallel/deferred/tape.h"

namespace cadre {

// Adds the recorder to libtorch's dispatcher, which exists once in a process. Later calls do
// nothing.
void install_recorder();

// Returns the tape of the innermost scope of this thread; null outside of all scopes.
std::shared_ptr<Tape>& tape_of_scope();

}  // namespace cadre
