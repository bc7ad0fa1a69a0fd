// Describes the distribution of a tensor over the ranks of a mesh by one Placement for each axis,
// and computes the part (Box) of the whole tensor that a rank holds.
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: values own what they hold.
// Errors: kInvalidArgument that names the placement, the axis or the sizes.
// Sizes, offsets and dims are in elements of the whole tensor. Source: DTensor's placements.
// Guide: docs/guide/parallel/mesh.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

// The ranks of the axis hold consecutive chunks of dimension `dim`, divided like torch.chunk:
// ceil(size / ranks) elements, the last chunks shorter or empty. A negative dim counts from the
// end.
struct Shard {
  explicit Shard(int64_t tensor_dim) : dim(tensor_dim) {}
  int64_t dim;
  friend bool operator==(const Shard&, const Shard&) = default;
};

// Every rank of the axis holds the same elements.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

// Every rank of the axis holds one operand of a reduction over the axis that has not been computed
// yet.
struct Partial {
  explicit Partial(ReduceOp reduce_op = ReduceOp::kSum) : op(reduce_op) {}
  ReduceOp op;
  friend bool operator==(const Partial&, const Partial&) = default;
};

class CADRE_EXPORT Placement {
 public:
  Placement(Shard shard) : kind_(shard) {}              // NOLINT: implicit
  Placement(Replicate replicate) : kind_(replicate) {}  // NOLINT: implicit
  Placement(Partial partial) : kind_(partial) {}        // NOLINT: implicit

  bool is_replicate() const { return std::holds_alternative<Replicate>(kind_); }
  // shard() and partial() return null for a placement of another kind.
  const Shard* shard() const { return std::get_if<Shard>(&kind_); }
  const Partial* partial() const { return std::get_if<Partial>(&kind_); }

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  std::variant<Shard, Replicate, Partial> kind_;
};

// Returns "Shard(0)", "Replicate()" or "Partial(sum)"; for a list "[Shard(0), Replicate()]".
CADRE_EXPORT std::string to_string(const Placement& placement);
CADRE_EXPORT std::string to_string(std::span<const Placement> placements);

// Returns the same list with dims from 0 to num_dims - 1. Throws for a list without exactly one
// placement for each of num_axes axes, for a dim that the tensor does not have, for
// Partial(premul_sum), and for Partials of different reductions, because their result would depend
// on the order of the axes (sum and avg may be combined).
CADRE_EXPORT std::vector<Placement> normalized(std::span<const Placement> placements,
                                               size_t num_axes, int64_t num_dims);

// A rectangular part of a tensor: along each dim, sizes[dim] elements that begin at offsets[dim].
struct Box {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  int64_t numel() const;
  friend bool operator==(const Box&, const Box&) = default;
};

// Returns the part of a tensor of these sizes that the rank at these coordinates holds. Axes that
// shard the same dim divide it one after the other, in the order of the mesh: each axis divides the
// chunk that the axis before it has made. The box of an empty chunk is at the end of the divided
// range. mesh_shape, coordinates and placements have one entry for each axis.
CADRE_EXPORT Box local_box(std::span<const int64_t> sizes, std::span<const int> mesh_shape,
                           std::span<const int> coordinates, std::span<const Placement> placements);

}  // namespace cadre
