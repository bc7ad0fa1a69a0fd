// A tensor that lies on the ranks of a mesh: what this rank holds of it, and how the ranks hold it
// together.
//
// Threads: as ProcessGroup. Blocking: redistribute() and full_tensor(): collectives of the groups
// along the axes that change, which all their ranks call in the same order, also a rank whose part
// is empty. Lifetime: a cheap value; it shares the local tensor and the mesh. Errors: cadre::Error,
// kInvalidArgument for placements, sizes and local tensors that do not fit each other; whatever
// the operations of the groups throw.
// Tensors: dense, CPU, a dtype of base/types.h, any shape. `sizes` are those of the whole tensor.
//
// Autograd goes through local(), from_local() and redistribute(), which is the identity of the
// whole tensor, and so is its derivative. The gradient of local() lies as the tensor does: a shard
// of the gradient for Shard, the whole gradient, equal on all ranks, for Replicate and for
// Partial(sum), and that divided by the number of operands for Partial(avg).
// Source: torch.distributed.tensor; docs/decisions/0012.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/mesh/device_mesh.h"
#include "cadre/mesh/placement.h"

namespace cadre {

struct RedistributeOptions {
  // Whether the result is to be differentiable, equal on all ranks of the mesh. Not given: if the
  // local tensor of any rank requires grad, for which the ranks exchange one byte along each axis
  // that changes; nothing where grad mode is off or the dtype has no gradient.
  std::optional<bool> requires_grad = {};
};

class CADRE_EXPORT DTensor {
 public:
  // Of a full tensor that every rank has: each takes its own part, without communication. The
  // result is a leaf that requires grad if the full tensor does, which must be a leaf then; to go
  // through autograd, use from_local(full, mesh, all Replicate(), sizes).redistribute(placements).
  static DTensor distribute(const at::Tensor& full, const DeviceMesh& mesh,
                            const std::vector<Placement>& placements);
  // Of what each rank holds already; local.sizes() must be local_box().sizes. Autograd goes through
  // it.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                            const std::vector<Placement>& placements, std::vector<int64_t> sizes);

  const at::Tensor& local() const { return local_; }
  const DeviceMesh& mesh() const { return mesh_; }
  // One for each axis of the mesh; dims from 0.
  const std::vector<Placement>& placements() const { return placements_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  // Where local() lies in the whole tensor.
  Box box() const;

  // The same tensor under other placements, any to any; differentiable. New memory, unless nothing
  // changes. What it moves: docs/guide/mesh.md.
  DTensor redistribute(const std::vector<Placement>& placements,
                       const RedistributeOptions& options = {}) const;
  // The whole tensor on every rank: local() under Replicate() on all axes.
  at::Tensor full_tensor(const RedistributeOptions& options = {}) const;

 private:
  DTensor(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
          std::vector<int64_t> sizes);

  at::Tensor local_;
  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::vector<int64_t> sizes_;
};

}  // namespace cadre
