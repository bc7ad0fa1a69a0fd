// Reads and increments the version counter of a tensor, by which autograd detects that a tensor was
// changed in place after it was saved for backward.
//
// Threads: as the tensor. Blocking: never. Errors: kInvalidArgument from refuse_inference_mode()
// and refuse_inference_tensors(). A tensor that was made in inference mode has no version counter:
// its version is always 0.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::wrap {

inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

// Increments the version counter; called after a write that autograd has not tracked.
inline void move_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Throws in inference mode. A wrapper calls it before it makes tensors: autograd does not train
// tensors that were made in inference mode, and libtorch reports that only later, without a name.
// `what` is the name of the object under construction, with which the message begins.
CADRE_EXPORT void refuse_inference_mode(std::string_view what);

// Throws if one of the tensors was made in inference mode; names the first.
CADRE_EXPORT void refuse_inference_tensors(std::string_view what,
                                           std::span<const NamedTensor> tensors);

}  // namespace cadre::wrap
