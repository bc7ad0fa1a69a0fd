// Policies that choose which ShardUnits of a model become units, without a call of fully_shard()
// for each.
//
// Threads: pure functions. Blocking: never. Errors: none.
// Any function of a WrapCandidate is a policy, too.
// Only a ShardUnit can be a unit: nothing runs before the forward() of another module. Source:
// torch.distributed.fsdp.wrap.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "cadre/parallel/fsdp/options.h"

namespace cadre {

// Chooses modules with at least min_numel elements in parameters that no unit below them holds.
inline WrapPolicy wrap_by_size(int64_t min_numel) {
  return [min_numel](const WrapCandidate& candidate) { return candidate.numel >= min_numel; };
}

// Chooses modules of the given types: BlockImpl for a ShardUnit<BlockImpl>.
template <typename... Modules>
WrapPolicy wrap_by_type() {
  return [](const WrapCandidate& candidate) {
    return ((dynamic_cast<const Modules*>(&candidate.module) != nullptr) || ...);
  };
}

}  // namespace cadre
