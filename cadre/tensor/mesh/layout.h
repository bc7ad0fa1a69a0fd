// Stores which axes of a mesh divide each dimension of a tensor, and in which order. In contrast to
// a list of placements it can also represent the intermediate states of a redistribution, in which
// this order may differ from that of the mesh.
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

class PlacementLayout {
 public:
  // REQUIRES: the placements are normalized() for the mesh and the number of dims.
  PlacementLayout(std::span<const int> mesh_shape, std::span<const Placement> placements,
                  size_t num_dims);

  int axis_size(size_t axis) const { return mesh_shape_[axis]; }
  size_t num_dims() const { return shards_.size(); }
  // Returns the axes that divide the dim, outermost first, without axes of size 1.
  const std::vector<size_t>& shards(size_t dim) const { return shards_[dim]; }
  // Returns the pending reduction of a Partial axis; nullopt for other axes.
  const std::optional<ReduceOp>& partial(size_t axis) const { return partials_[axis]; }
  bool is_sharded(size_t axis) const;
  bool is_replicated(size_t axis) const { return !partials_[axis] && !is_sharded(axis); }

  // Makes an axis that was replicated or partial divide the dim, inside all axes that already
  // divide it.
  void add_shard(size_t dim, size_t axis);
  void set_partial(size_t axis, std::optional<ReduceOp> op) { partials_[axis] = op; }

  // Returns the axis by which the dim must be divided next to reach `target`; nullopt if the axes
  // of this layout are not the beginning of those in `target`, or are already equal to them.
  std::optional<size_t> next_shard(size_t dim, const PlacementLayout& target) const;
  // Returns the axes, in ascending order, along which a redistribution to `target` without a
  // reduction moves elements: for each dim, the axes after the common prefix of the two layouts.
  // Ranks that differ only along these axes together hold the same region of the tensor before and
  // after.
  std::vector<size_t> involved_axes(const PlacementLayout& target) const;

  Box box_of(std::span<const int64_t> sizes, std::span<const int> coordinates) const;

 private:
  std::vector<int> mesh_shape_;
  std::vector<std::vector<size_t>> shards_;        // one list for each dim
  std::vector<std::optional<ReduceOp>> partials_;  // one entry for each axis
};

// Returns the intersection of two boxes of one tensor; a box of 0 elements if they are disjoint.
Box intersection(const Box& a, const Box& b);

}  // namespace cadre
