// Records which differentiable collectives the backwards of a thread have run. Their gradient is
// that of the sum of all ranks' losses, so gradients of other ranks are already added inside the
// backward. A wrapper that gives each rank a weight reads this record, because it multiplies the
// gradients of the parameters only after that addition.
//
// Threads: each thread has its own record. Blocking: never. Lifetime: values; a record has one
// entry for each set of ranks. Errors: none.
#pragma once

#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// Records that the running backward of this thread has run a collective of `group`. A collective's
// graph node calls it in backward.
void note_backward_collective(const ProcessGroup& group);

// Returns the number of the backward that runs in this thread; -1 if none runs. Numbers grow with
// each backward of the process.
CADRE_EXPORT int current_backward();

// Returns the global ranks of each group whose differentiable collectives have run in this thread
// since backward number `backward` began. Nested backwards are included.
CADRE_EXPORT std::vector<std::vector<int>> collectives_since(int backward);

}  // namespace cadre
