// Checks differentiable collectives (cadre::functional) that ran in a backward whose ranks are
// weighted by unequal numbers of samples. Such a collective adds gradients of other ranks before
// the wrapper multiplies this rank's gradients by the rank's weight. So the result is the gradient
// of the weighted mean only if the ranks of the collective have equal weights.
//
// Blocking: check_equal_samples() is collective. Errors: kInvalidArgument, the same on all ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cadre/parallel/reduction/agreement/wrapper.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::reduction {

// `groups` lists the global ranks of each process group in which a collective ran. For each of
// these groups that shares at least two ranks with `group`, returns the shared ranks as ranks of
// `group`.
std::vector<std::vector<int>> shared_ranks(std::span<const std::vector<int>> groups,
                                           const wrap::LocatedGroup& group);

// Throws if ranks that took part in the same collective have unequal numbers of samples.
// `exchanged` lists, for each collective that this rank has run, its ranks within `group`. If one
// rank of `group` has run such a collective, all ranks of `group` call this function.
void check_equal_samples(std::span<const std::vector<int>> exchanged, int64_t num_samples,
                         const Wrapper& here, const wrap::LocatedGroup& group);

}  // namespace cadre::reduction
