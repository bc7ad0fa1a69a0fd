// The values that stages hand to each other. Each is in memory of the receiver's own: a stage may
// return a buffer that it changes in place later, its input, a view of a parameter or one tensor
// twice, and the next stage may change its inputs in place.
//
// Threads: pure functions. Blocking: never. Lifetime: the results are new tensors. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre::parallel {

// Returns the values without history, in memory to which only the result refers: the memory of
// `tensor` itself if this reference is the only one to it, else a copy. Returns an undefined tensor
// for an undefined one.
at::Tensor own_values(const at::Tensor& tensor);

// Returns the input of a forward, which the forward may change in place. libtorch throws if a leaf
// that requires grad, or a view of it, is changed. So for such a leaf the input is the result of an
// operation that has the same gradient. It has the memory of the leaf, which nothing else reads.
// Any other tensor is returned itself.
at::Tensor forward_input(const at::Tensor& leaf);

}  // namespace cadre::parallel
