// Provides policies that choose which ShardUnits of a model become units, instead of a call of
// fully_shard() for each of them.
//
// Any function that takes a WrapCandidate and returns bool is a policy, too. Only a ShardUnit can
// be a unit, because no code of Cadre runs before the forward() of other modules. Source:
// torch.distributed.fsdp.wrap.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "cadre/parallel/fsdp/options.h"

namespace cadre {

// Chooses modules whose parameters have at least min_numel elements, without the parameters of
// units inside of them.
inline WrapPolicy wrap_by_size(int64_t min_numel) {
  return [min_numel](const WrapCandidate& candidate) { return candidate.numel >= min_numel; };
}

// Chooses modules of the given types: wrap_by_type<BlockImpl>() chooses each ShardUnit<BlockImpl>.
template <typename... Modules>
WrapPolicy wrap_by_type() {
  return [](const WrapCandidate& candidate) {
    return ((dynamic_cast<const Modules*>(&candidate.module) != nullptr) || ...);
  };
}

}  // namespace cadre
