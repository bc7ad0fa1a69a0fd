#include "cadre/shard/parameter_shard.h"

#include <algorithm>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"

namespace cadre {
namespace {

// Cuts a range of a box into boxes: rows of a dim that it covers completely are one box, and of the
// first and the last row, of which it may cover a part, the same is done with the dims behind.
class Cutter {
 public:
  explicit Cutter(const Box& box) : box_(box), row_numels_(box.sizes.size()) {
    int64_t numel = 1;
    for (size_t dim = box.sizes.size(); dim-- > 0;) {
      row_numels_[dim] = numel;
      numel *= box.sizes[dim];
    }
  }

  // The range counts the elements of `row`, which is the whole box or has size 1 in all dims before
  // `dim`.
  void cut(Box row, size_t dim, FlatRange range) {
    if (range.size() == 0) return;
    if (dim == box_.sizes.size()) {
      boxes.push_back(std::move(row));
      return;
    }
    const int64_t numel = row_numels_[dim];
    int64_t first = range.begin / numel;
    if (range.begin % numel != 0) {
      const int64_t end = std::min(range.end - first * numel, numel);
      cut(rows(row, dim, {first, first + 1}), dim + 1, {range.begin % numel, end});
      ++first;
    }
    const int64_t last = range.end / numel;
    if (first > last) return;
    if (first < last) boxes.push_back(rows(row, dim, {first, last}));
    cut(rows(row, dim, {last, last + 1}), dim + 1, {0, range.end % numel});
  }

  std::vector<Box> boxes;

 private:
  static Box rows(Box box, size_t dim, FlatRange range) {
    box.offsets[dim] += range.begin;
    box.sizes[dim] = range.size();
    return box;
  }

  const Box& box_;
  std::vector<int64_t> row_numels_;  // of one row of each dim
};

}  // namespace

Box local_box_of(const ParameterShard& shard) {
  return local_box(shard.sizes, shard.mesh.shape(), shard.mesh.coordinates(), shard.placements);
}

std::vector<Box> boxes_of(const ParameterShard& shard) {
  return boxes_of_range(local_box_of(shard), shard.range);
}

std::vector<Box> boxes_of_range(const Box& box, const FlatRange& range) {
  if (range.begin < 0 || range.end < range.begin || range.end > box.numel()) {
    throw Error(ErrorCode::kInvalidArgument,
                format("boxes_of_range: elements [{}, {}) are no range of a box of {} elements",
                       range.begin, range.end, box.numel()));
  }
  Cutter cutter(box);
  cutter.cut(box, 0, range);
  return std::move(cutter.boxes);
}

std::vector<ProcessGroup> dividing_groups(std::span<const ParameterShard> shards) {
  std::vector<ProcessGroup> groups;
  if (shards.empty()) return groups;
  const DeviceMesh& mesh = shards[0].mesh;
  for (size_t i = 0; i < mesh.axes().size(); ++i) {
    const MeshAxis& axis = mesh.axes()[i];
    const bool is_divided = std::ranges::any_of(shards, [&](const ParameterShard& shard) {
      return shard.placements[i].shard() != nullptr || shard.flat_axis == axis.name;
    });
    if (is_divided && axis.size > 1) groups.push_back(mesh.group(axis.name));
  }
  return groups;
}

}  // namespace cadre
