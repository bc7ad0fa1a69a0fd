// Redistribution of a tensor between two lists of placements on a mesh: chooses the reductions,
// exchanges and slices, and defines the derivative.
//
// Threads: as ProcessGroup. Blocking: a collective of the groups along the axes concerned; returns
// when its operations are done, each with the deadline of its group. Lifetime: the graph keeps the
// mesh. Errors: cadre::Error of the operations; kInvalidArgument for a derivative that does not
// exist.
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

// Returns this rank's part under `to`: new memory, contiguous, not a view, outside autograd. A
// tensor without elements needs no communication, but every rank calls it, also one whose part is
// empty.
at::Tensor redistribute_values(const Redistribution& move, const at::Tensor& local);

// Does the same through autograd. requires_grad: RedistributeOptions::requires_grad.
at::Tensor redistribute_through_autograd(const Redistribution& move, const at::Tensor& local,
                                         std::optional<bool> requires_grad);

}  // namespace cadre
