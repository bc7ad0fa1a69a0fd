#include "cadre/parallel/shard/division/boxes.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::shard {
namespace {

// Cuts a range of a box's elements into boxes. All rows of a dim that the range covers completely
// form one box. The range may cover only a part of its first and of its last row; such a row is cut
// by recursion along the next dim.
class Cutter {
 public:
  explicit Cutter(const Box& box) : box_(box), row_numels_(box.sizes.size()) {
    int64_t numel = 1;
    for (size_t dim = box.sizes.size(); dim-- > 0;) {
      row_numels_[dim] = numel;
      numel *= box.sizes[dim];
    }
  }

  // `range` is a range of the elements of `row`. `row` is the whole box, or has size 1 in all dims
  // before `dim`.
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
  std::vector<int64_t> row_numels_;  // row_numels_[dim] is the number of elements of one row
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

}  // namespace cadre::shard
