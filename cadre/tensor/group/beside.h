// Allocates tensors in the same kind of memory as another tensor: if that one is offloaded to a
// file (FileOffload), in the same file. An optimizer puts the state of an offloaded parameter
// there.
//
// Threads: any. Blocking: for disk accesses. Lifetime: as at::zeros_like(). Errors:
// cadre::Error with kUnavailable for a full disk.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"

namespace cadre {

// Returns at::zeros_like(tensor); if the tensor is in a file, the zeros are in the same file.
CADRE_EXPORT at::Tensor zeros_beside(const at::Tensor& tensor);
// Returns the tensor itself if `place` is in no file, or if both are in the same file. Otherwise
// returns a copy in the file of `place`.
CADRE_EXPORT at::Tensor moved_beside(const at::Tensor& place, const at::Tensor& tensor);

}  // namespace cadre
