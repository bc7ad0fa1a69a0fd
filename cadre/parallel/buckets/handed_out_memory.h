// Memory of gradients that is to be written again while the program still holds it: the program got
// a gradient from parameter.grad(), cleared the parameters' gradients, and keeps the handle, or a
// view of it, with the values of that step.
//
// Threads: as the tensors. Blocking: never. Errors: those of the allocator.
// Source: the opposite of c10d's gradient_as_bucket_view=true, in which such a handle changes.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre {

// Moves the storage of `flat`, and so every tensor in it, to a copy of its memory. Returns a tensor
// with the sizes and strides of `flat` in the memory itself, which other ranks may access
// (symmetric memory). Local to this rank.
at::Tensor take_memory_back(const at::Tensor& flat);

}  // namespace cadre
