// Differentiable collectives in a pass whose ranks have unequal weights. Such a collective adds
// gradients of other ranks before the wrapper multiplies the gradients of parameters by the weight
// of this rank, so the result is the gradient of the weighted mean only where the ranks of the
// collective have equal weights.
//
// Threads: one. Blocking: check_equal_samples() is collective. Errors: kInvalidArgument, the same
// on all ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cadre/parallel/reduction/agreement/wrapper.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::reduction {

// groups: the global ranks of collectives, by group. Returns the ranks that these have in `group`,
// for each group that shares at least two ranks with it.
std::vector<std::vector<int>> shared_ranks(std::span<const std::vector<int>> groups,
                                           const wrap::LocatedGroup& group);

// Throws if the ranks of a collective have unequal numbers of samples. exchanged: the ranks, in
// `group`, of each collective that this rank has run. All ranks of `group` call this if one of them
// has run such a collective.
void check_equal_samples(std::span<const std::vector<int>> exchanged, int64_t num_samples,
                         const Wrapper& here, const wrap::LocatedGroup& group);

}  // namespace cadre::reduction
