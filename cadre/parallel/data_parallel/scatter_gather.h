// Divides a batch among devices, and joins the outputs of the replicas.
//
// Threads: any; the operations run on the current stream of each device. Both functions are
// differentiable. Source: torch.nn.parallel.scatter and gather.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <vector>

#include "cadre/core/base/export.h"

namespace cadre::data_parallel {

// Returns the part of `input` for each device: rows of dimension `dim`, as at::chunk() divides
// them. So the first parts have one size and the last may have fewer rows; with fewer rows than
// devices there are fewer parts, and a batch without rows is one part. The part of the device on
// which `input` is shares its memory.
CADRE_EXPORT std::vector<at::Tensor> scatter(const at::Tensor& input,
                                             std::span<const c10::Device> devices, int64_t dim = 0);

// Returns the outputs on `device`, concatenated along `dim`. Outputs without dimensions, such as a
// loss, become the elements of a vector. Throws kInvalidArgument if there is no output, or if only
// some of them have dimensions.
CADRE_EXPORT at::Tensor gather(std::span<const at::Tensor> outputs, c10::Device device,
                               int64_t dim = 0);

}  // namespace cadre::data_parallel
