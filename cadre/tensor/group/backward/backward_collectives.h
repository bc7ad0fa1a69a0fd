// Which differentiable collectives the backwards of a thread have run: those whose gradient is that
// of the sum of the ranks' losses, so that the backward adds gradients of other ranks. A wrapper
// that weights ranks asks, because it multiplies the gradients of parameters, after the addition.
//
// Threads: each has a record of its own. Blocking: never. Lifetime: values; a record has one entry
// for each set of ranks. Errors: none.
#pragma once

#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// By a node of the graph, in its backward.
void note_backward_collective(const ProcessGroup& group);

// The backward that runs in this thread, by a number that grows with each backward of the process.
CADRE_EXPORT int current_backward();

// The global ranks of each group whose collectives have run in this thread since that backward
// began, in it or in one that is nested in it.
CADRE_EXPORT std::vector<std::vector<int>> collectives_since(int backward);

}  // namespace cadre
