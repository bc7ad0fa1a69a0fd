// Lets a bucket reuse its memory while the program still holds a gradient in it. Such a program has
// taken a tensor from parameter.grad(), has then cleared the gradients, and expects that the tensor
// keeps its values.
//
// Unlike with gradient_as_bucket_view=true of c10d, the values of such a tensor do not change.
#pragma once

#include <ATen/core/Tensor.h>

namespace cadre {

// Gives the storage of `flat` a copy of its memory, so that `flat` and all tensors that share its
// storage keep their values there. Returns a new tensor with the sizes and strides of `flat` in the
// original memory, which may be symmetric memory of the group. Does not communicate.
at::Tensor take_memory_back(const at::Tensor& flat);

// Returns the tensor as a group gets it for a call. A group owns the storage of a tensor on a
// device until the device has ended the call, which may be long after the pass; the result has a
// storage of its own, so that the group does not count as an owner of the gradients. On the CPU
// returns `flat` itself.
at::Tensor lent(const at::Tensor& flat);

}  // namespace cadre
