#include "cadre/parallel/shard/flat_layout.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

int64_t divided_up(int64_t count, int64_t divisor) {
  return (count + divisor - 1) / divisor;
}

int64_t rounded_up(int64_t count, int64_t unit) {
  return divided_up(count, unit) * unit;
}

}  // namespace

FlatLayout::FlatLayout(std::vector<int64_t> numels, int num_shards, FlatAlignment alignment)
    : numels_(std::move(numels)), num_shards_(num_shards) {
  const int64_t least_alignment = std::min(alignment.of_shards, alignment.of_tensors);
  if (num_shards < 1 || least_alignment < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("FlatLayout: {} shards with an alignment of {} elements; both must be at "
                       "least 1",
                       num_shards, least_alignment));
  }
  int64_t offset = 0;
  for (size_t i = 0; i < numels_.size(); ++i) {
    if (numels_[i] < 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("FlatLayout: tensor {} has {} elements; a count is at least 0", i, numels_[i]));
    }
    offsets_.push_back(rounded_up(offset, alignment.of_tensors));
    if (numels_[i] > 0) offset = offsets_.back() + numels_[i];
  }
  shard_numel_ = rounded_up(divided_up(offset, num_shards), alignment.of_shards);
}

FlatRange FlatLayout::range(size_t parameter, int shard) const {
  const int64_t first = shard * shard_numel_ - offsets_[parameter];
  const int64_t numel = numels_[parameter];
  return {.begin = std::clamp<int64_t>(first, 0, numel),
          .end = std::clamp<int64_t>(first + shard_numel_, 0, numel)};
}

int64_t FlatLayout::offset_in_shard(size_t parameter, int shard) const {
  const int64_t first = shard * shard_numel_ - offsets_[parameter];
  return std::clamp<int64_t>(range(parameter, shard).begin - first, 0, shard_numel_);
}

}  // namespace cadre
