// Memory of gradients that a program still holds when it is to be written again: the program got a
// gradient from parameter.grad(), cleared the parameters' gradients, and keeps the handle, or a
// view of it, with the values of that step.
//
// Threads: as the tensors. Blocking: never. Errors: those of the allocator.
// Source: the opposite of c10d's gradient_as_bucket_view=true, in which such a handle changes.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre {

// Gives all other tensors in the storage of `flat` a copy of its memory with the values, and
// returns a tensor of the form of `flat` with the memory itself, whose address, as that of
// symmetric memory, the ranks may know. Local to this rank.
at::Tensor take_memory_back(const at::Tensor& flat);

}  // namespace cadre
