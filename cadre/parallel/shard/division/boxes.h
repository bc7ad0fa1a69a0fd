// The boxes of a whole tensor that a rank owns, as its ParameterShard says.
//
// Threads: pure functions. Errors: kInvalidArgument for a range that is not in its box.
#pragma once

#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/mesh/placement.h"

namespace cadre::shard {

// Returns the part of the whole tensor that the placements give this rank; `range` counts its
// elements.
CADRE_EXPORT Box local_box_of(const ParameterShard& shard);
// Returns the boxes of the whole tensor that the range covers, in row-major order, at most 2 * dims
// - 1 (one for a tensor of 0 dims); their elements, one box after the other, are `values`.
CADRE_EXPORT std::vector<Box> boxes_of(const ParameterShard& shard);
CADRE_EXPORT std::vector<Box> boxes_of_range(const Box& box, const FlatRange& range);

}  // namespace cadre::shard
