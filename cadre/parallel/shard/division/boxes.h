// Computes which boxes of a whole tensor a rank owns according to its ParameterShard.
//
// Threads: pure functions. Errors: kInvalidArgument for a range that is not in its box.
#pragma once

#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre::shard {

// Returns the box of the whole tensor that this rank has according to the placements. `shard.range`
// is a range of the elements of this box.
CADRE_EXPORT Box local_box_of(const ParameterShard& shard);
// Returns the boxes of the whole tensor that `shard.range` covers, in row-major order. There are at
// most 2 * dims - 1 of them, or one for a tensor of 0 dims. Their elements, one box after the
// other, are the elements of `shard.values`.
CADRE_EXPORT std::vector<Box> boxes_of(const ParameterShard& shard);
CADRE_EXPORT std::vector<Box> boxes_of_range(const Box& box, const FlatRange& range);

}  // namespace cadre::shard
