// Describes which axes of a mesh divide each dimension of a tensor, and in which order. It
// represents lists of placements and the intermediate states of a redistribution.
//
// Threads: plain values. Blocking: never. Lifetime: owns what it holds. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cadre/tensor/mesh/placement.h"

namespace cadre {

struct Chunk {
  int64_t begin;
  int64_t size;
};

// Divides `size` elements into chunks of ceil(size / num_chunks), the last ones shorter or empty.
// Source: torch.chunk.
Chunk chunk_of(int64_t size, int num_chunks, int index);
int64_t full_chunk(int64_t size, int num_chunks);

class Layout {
 public:
  // REQUIRES: the placements are normalized() for the mesh and the number of dims.
  Layout(std::span<const int> mesh_shape, std::span<const Placement> placements, size_t num_dims);

  int axis_size(size_t axis) const { return mesh_shape_[axis]; }
  size_t num_dims() const { return shards_.size(); }
  // Returns the axes that divide the dim, in the order in which they divide it; axes of size 1 are
  // left out.
  const std::vector<size_t>& shards(size_t dim) const { return shards_[dim]; }
  // Returns the reduction of an axis whose ranks hold operands; nullopt for other axes.
  const std::optional<ReduceOp>& partial(size_t axis) const { return partials_[axis]; }
  bool is_sharded(size_t axis) const;
  bool is_replicated(size_t axis) const { return !partials_[axis] && !is_sharded(axis); }

  // Makes an axis that was replicated or partial divide the dim, after all axes that divide it
  // already.
  void add_shard(size_t dim, size_t axis);
  void set_partial(size_t axis, std::optional<ReduceOp> op) { partials_[axis] = op; }

  // Returns the next axis that divides the dim in `target`, if this layout divides the dim by
  // exactly the axes before it; nullopt otherwise.
  std::optional<size_t> next_shard(size_t dim, const Layout& target) const;
  // Returns the axes, in ascending order, along which elements move from this layout to the target
  // if nothing is reduced: for each dim, the axes after the common prefix of the two orders. Ranks
  // that differ only in these axes together hold the same region of the tensor in both layouts.
  std::vector<size_t> involved_axes(const Layout& target) const;

  Box box_of(std::span<const int64_t> sizes, std::span<const int> coordinates) const;

 private:
  std::vector<int> mesh_shape_;
  std::vector<std::vector<size_t>> shards_;        // has one list for each dim
  std::vector<std::optional<ReduceOp>> partials_;  // has one entry for each axis
};

// Returns the intersection of two boxes of one tensor; a box of 0 elements if they are disjoint.
Box intersection(const Box& a, const Box& b);

}  // namespace cadre
