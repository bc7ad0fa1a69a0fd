// A tensor that is distributed over the ranks of a mesh, represented by this rank's local tensor
// and the placements.
//
// Threads: as ProcessGroup. Blocking: distribute() and from_local() are collectives of all ranks of
// the mesh; redistribute() and full_tensor() are collectives of the groups along the axes that
// change. All these ranks must call them in the same order, even if their part is empty. Lifetime:
// a cheap value; it shares the local tensor and the mesh. Errors: cadre::Error, kInvalidArgument
// for placements, sizes and local tensors that do not match, or are not the same on all ranks. If
// the arguments of distribute() or from_local() are invalid on one rank, they throw on all ranks,
// and the mesh stays usable. redistribute() throws only on the ranks whose arguments are invalid,
// so pass the same on all ranks. Errors of the groups' operations are passed on. Tensors: dense,
// on the CPU or on the groups' device, on all ranks alike, a dtype of core/base/types.h, any shape.
// `sizes` are those of the whole tensor.
//
// local(), from_local() and redistribute() are differentiable. redistribute() does not change the
// whole tensor, so its derivative is the identity. The gradient of local() has the distribution of
// the tensor: a shard of the gradient for Shard; the whole gradient, equal on all ranks, for
// Replicate and for Partial(sum); the whole gradient divided by the number of operands for
// Partial(avg).
// Source: torch.distributed.tensor; docs/decisions/0012.
// Guide: docs/guide/parallel/mesh.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre {

struct RedistributeOptions {
  // Whether the result requires grad; must be equal on all ranks of the mesh. By default it
  // requires grad if the local tensor of any rank does. To determine that, the ranks run an
  // all_reduce of one byte along each axis that changes, but not if grad mode is off or the dtype
  // has no gradient.
  std::optional<bool> requires_grad = {};
};

class CADRE_EXPORT DTensor {
 public:
  // Distributes a full tensor that every rank has: each rank copies its own part; no element is
  // sent. The result is a leaf. It requires grad if the full tensor does, which must then be a
  // leaf. For a differentiable distribution use from_local(full, mesh, all Replicate(),
  // sizes).redistribute(placements).
  static DTensor distribute(const at::Tensor& full, const DeviceMesh& mesh,
                            const std::vector<Placement>& placements);
  // Makes a DTensor from the parts that the ranks already have; local.sizes() must be
  // local_box().sizes. Differentiable.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh,
                            const std::vector<Placement>& placements, std::vector<int64_t> sizes);
  // A move is a copy, so that an object that was moved from is usable.
  DTensor(const DTensor&) = default;
  DTensor& operator=(const DTensor&) = default;

  const at::Tensor& local() const { return local_; }
  const DeviceMesh& mesh() const { return mesh_; }
  // Returns one placement for each axis of the mesh; dims count from 0.
  const std::vector<Placement>& placements() const { return placements_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  // Returns the offsets and sizes of local() in the whole tensor.
  Box box() const;

  // Returns the same tensor under other placements; every pair of placements is supported.
  // Differentiable. The result has new memory, unless the placements are equal.
  // docs/guide/parallel/mesh.md lists the communication.
  DTensor redistribute(const std::vector<Placement>& placements,
                       const RedistributeOptions& options = {}) const;
  // Returns the whole tensor on every rank: local() under Replicate() on all axes.
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
