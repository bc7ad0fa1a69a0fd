#include "cadre/tensor/mesh/layout.h"

#include <algorithm>
#include <set>

namespace cadre {

int64_t full_chunk(int64_t size, int num_chunks) {
  return (size + num_chunks - 1) / num_chunks;
}

Chunk chunk_of(int64_t size, int num_chunks, int index) {
  const int64_t full = full_chunk(size, num_chunks);
  const int64_t begin = std::min(index * full, size);
  return {begin, std::min(full, size - begin)};
}

PlacementLayout::PlacementLayout(std::span<const int> mesh_shape,
                                 std::span<const Placement> placements, size_t num_dims)
    : mesh_shape_(mesh_shape.begin(), mesh_shape.end()),
      shards_(num_dims),
      partials_(mesh_shape.size()) {
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (const Shard* shard = placements[axis].shard()) {
      add_shard(static_cast<size_t>(shard->dim), axis);
    } else if (const Partial* partial = placements[axis].partial()) {
      partials_[axis] = partial->op;
    }
  }
}

bool PlacementLayout::is_sharded(size_t axis) const {
  return std::ranges::any_of(shards_, [axis](const std::vector<size_t>& axes) {
    return std::ranges::find(axes, axis) != axes.end();
  });
}

void PlacementLayout::add_shard(size_t dim, size_t axis) {
  partials_[axis].reset();
  if (mesh_shape_[axis] > 1) shards_[dim].push_back(axis);
}

std::optional<size_t> PlacementLayout::next_shard(size_t dim, const PlacementLayout& target) const {
  const std::vector<size_t>& from = shards_[dim];
  const std::vector<size_t>& to = target.shards_[dim];
  if (from.size() >= to.size() || !std::equal(from.begin(), from.end(), to.begin())) {
    return std::nullopt;
  }
  return to[from.size()];
}

std::vector<size_t> PlacementLayout::involved_axes(const PlacementLayout& target) const {
  std::set<size_t> axes;
  for (size_t dim = 0; dim < shards_.size(); ++dim) {
    const std::vector<size_t>& from = shards_[dim];
    const std::vector<size_t>& to = target.shards_[dim];
    const auto [a, b] = std::mismatch(from.begin(), from.end(), to.begin(), to.end());
    axes.insert(a, from.end());
    axes.insert(b, to.end());
  }
  return {axes.begin(), axes.end()};
}

Box PlacementLayout::box_of(std::span<const int64_t> sizes,
                            std::span<const int> coordinates) const {
  Box box{std::vector<int64_t>(sizes.size(), 0), {sizes.begin(), sizes.end()}};
  for (size_t dim = 0; dim < shards_.size(); ++dim) {
    for (const size_t axis : shards_[dim]) {
      const Chunk chunk = chunk_of(box.sizes[dim], mesh_shape_[axis], coordinates[axis]);
      box.offsets[dim] += chunk.begin;
      box.sizes[dim] = chunk.size;
    }
  }
  return box;
}

Box intersection(const Box& a, const Box& b) {
  Box common;
  for (size_t dim = 0; dim < a.sizes.size(); ++dim) {
    const int64_t begin = std::max(a.offsets[dim], b.offsets[dim]);
    const int64_t end = std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]);
    common.offsets.push_back(begin);
    common.sizes.push_back(std::max<int64_t>(end - begin, 0));
  }
  return common;
}

}  // namespace cadre
