// The version counter of a tensor, by which autograd notices that a value was changed in place
// after it was saved for backward.
//
// Threads: as the tensor. Blocking: never. Errors: none. A tensor of inference mode has no version
// counter: its version is always 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cadre::wrap {

inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

// After a change that autograd has not seen.
inline void move_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace cadre::wrap
