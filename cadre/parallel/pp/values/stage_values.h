// The values that stages hand to each other. Each is in memory of the receiver's own: a stage may
// return a buffer that it changes in place later, its input, a view of a parameter or one tensor
// twice, and the next stage may change its inputs in place.
//
// Threads: pure functions. Blocking: never. Lifetime: the results are new tensors. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre::parallel {

// Returns the values without history, in memory that only the result refers to: the memory of
// `tensor` itself if nothing but this one reference holds it, else a copy. Undefined for an
// undefined tensor.
at::Tensor own_values(const at::Tensor& tensor);

// Returns the input of a forward, which may change it in place. For a leaf that requires grad it is
// the result of an operation whose gradient is the leaf's, because libtorch refuses to change a
// leaf or its views. The memory is the leaf's, which nothing else reads. Any other tensor is
// returned itself.
at::Tensor forward_input(const at::Tensor& leaf);

}  // namespace cadre::parallel
