// Makes the tensors that stages pass to each other independent of the sender's memory. This is
// necessary because a stage may return a buffer that it changes in place later, its own input, a
// view of a parameter, or one tensor twice, and the next stage may change its inputs in place.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre::parallel {

// Returns the values of `tensor`, detached, in memory to which only the result refers. If `tensor`
// is the only reference to its memory, that memory is used, else the values are copied. Returns an
// undefined tensor for an undefined one.
at::Tensor own_values(const at::Tensor& tensor);

// Returns the input for a forward, which the forward may change in place. libtorch throws if a leaf
// that requires grad, or a view of it, is changed in place. So for such a leaf the function returns
// the output of an identity operation, which passes the gradient on and uses the memory of the
// leaf; nothing else reads this memory. Any other tensor is returned unchanged.
at::Tensor forward_input(const at::Tensor& leaf);

}  // namespace cadre::parallel
