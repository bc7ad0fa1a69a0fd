// Tensors beside another one: in the same file, if the other one is in a file (FileOffload), such
// as the state that an optimizer keeps for an offloaded parameter.
//
// Threads: any. Blocking: for the time of the disk. Lifetime: as at::zeros_like(). Errors:
// cadre::Error with kUnavailable for a full disk.
#pragma once

#include <ATen/core/Tensor.h>

#include "cadre/core/base/export.h"

namespace cadre {

// Returns at::zeros_like(tensor); if the tensor is in a file, the zeros are in the same file.
CADRE_EXPORT at::Tensor zeros_beside(const at::Tensor& tensor);
// Returns the tensor itself if it is in the same file as `place`, or if `place` is in no file; else
// a copy in that file.
CADRE_EXPORT at::Tensor moved_beside(const at::Tensor& place, const at::Tensor& tensor);

}  // namespace cadre
