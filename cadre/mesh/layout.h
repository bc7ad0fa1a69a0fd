// Which axes of a mesh divide each dimension of a tensor, and in which order: placements, and what
// lies between two lists of placements while a tensor moves from one to the other.
//
// Threads: plain values. Blocking: never. Lifetime: owns what it holds. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cadre/mesh/placement.h"

namespace cadre {

struct Chunk {
  int64_t begin;
  int64_t size;
};

// Of `size` elements in `num_chunks` chunks of ceil(size / num_chunks), the last ones shorter or
// empty. Source: torch.chunk.
Chunk chunk_of(int64_t size, int num_chunks, int index);
int64_t full_chunk(int64_t size, int num_chunks);

class Layout {
 public:
  // REQUIRES: the placements are normalized() for the mesh and the number of dims.
  Layout(std::span<const int> mesh_shape, std::span<const Placement> placements, size_t num_dims);

  int axis_size(size_t axis) const { return mesh_shape_[axis]; }
  size_t num_dims() const { return shards_.size(); }
  // The axes that divide the dim, in the order in which they do; none of size 1.
  const std::vector<size_t>& shards(size_t dim) const { return shards_[dim]; }
  // Of an axis of which the ranks hold operands of a reduction.
  const std::optional<ReduceOp>& partial(size_t axis) const { return partials_[axis]; }
  bool is_sharded(size_t axis) const;
  bool is_replicated(size_t axis) const { return !partials_[axis] && !is_sharded(axis); }

  // The axis, replicated or partial before, divides the dim after all that divide it already.
  void add_shard(size_t dim, size_t axis);
  void set_partial(size_t axis, std::optional<ReduceOp> op) { partials_[axis] = op; }

  // The next axis that divides the dim in `target`, if this layout has divided it by those before
  // it, and by no other.
  std::optional<size_t> next_shard(size_t dim, const Layout& target) const;
  // The axes, in ascending order, along which elements have to move from this layout to the target
  // if nothing is reduced: of each dim those after the common beginning of the two orders. Ranks
  // that are equal in all other axes hold the same region of the tensor in both.
  std::vector<size_t> involved_axes(const Layout& target) const;

  Box box_of(std::span<const int64_t> sizes, std::span<const int> coordinates) const;

 private:
  std::vector<int> mesh_shape_;
  std::vector<std::vector<size_t>> shards_;        // by dim
  std::vector<std::optional<ReduceOp>> partials_;  // by axis
};

// What two boxes of one tensor share; of 0 elements if nothing.
Box intersection(const Box& a, const Box& b);

}  // namespace cadre
