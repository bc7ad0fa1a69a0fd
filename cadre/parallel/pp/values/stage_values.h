// The values that stages hand to each other, each of which is the receiver's own memory: a stage
// may return a buffer that it changes in place later, its input, a view of a parameter or one
// tensor twice, and the next one may change its inputs in place.
//
// Threads: pure functions. Blocking: never. Lifetime: the results are new tensors. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre::parallel {

// The values without history, in memory that only the result refers to: the memory of `tensor`
// itself if nothing but this one reference holds it, else a copy. May be undefined.
at::Tensor own_values(const at::Tensor& tensor);

// For a forward, which may change its inputs in place: the values of a leaf that requires grad, as
// the result of an operation whose gradient is the leaf's. libtorch refuses such a change of a leaf
// and of its views. The memory is the leaf's, which nothing else reads. Any other tensor: itself.
at::Tensor forward_input(const at::Tensor& leaf);

}  // namespace cadre::parallel
