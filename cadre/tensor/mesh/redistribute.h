// Redistributes a tensor from one list of placements on a mesh to another: chooses the reductions,
// exchanges and slices that do so, and defines the derivative.
//
// Threads: as ProcessGroup. Blocking: a collective of the groups along the axes whose placement
// changes; returns when its operations are done. Each operation has the timeout of its group.
// Lifetime: the graph keeps the mesh. Errors: cadre::Error of the operations; kInvalidArgument for
// a derivative that does not exist.
// `local`: this rank's part of a tensor of `sizes` under `from`, with any strides and a dtype of
// core/base/types.h. It may be a negated view or a zero tensor without memory.
// Source: DTensor's redistribute; docs/decisions/0012.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre {

// REQUIRES: from and to are normalized().
struct Redistribution {
  DeviceMesh mesh;
  std::vector<int64_t> sizes;
  std::vector<Placement> from;
  std::vector<Placement> to;
};

// Returns this rank's part under the placements `to`, as a contiguous tensor with new memory that
// is no view. Not recorded by autograd. Every rank must call it, even if its part is empty.
at::Tensor redistribute_values(const Redistribution& move, const at::Tensor& local);

// Redistributes like redistribute_values(), but recorded by autograd. requires_grad: see
// RedistributeOptions::requires_grad.
at::Tensor redistribute_through_autograd(const Redistribution& move, const at::Tensor& local,
                                         std::optional<bool> requires_grad);

}  // namespace cadre
