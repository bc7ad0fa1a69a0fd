// Provides policies that choose which modules of a model become units. Any function that takes a
// WrapCandidate and returns bool is a policy, too. Source: torch.distributed.fsdp.wrap.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <type_traits>

#include "cadre/parallel/fsdp/options.h"

namespace cadre {

// Chooses ShardUnits whose parameters have at least min_numel elements, without the parameters of
// units inside of them.
inline WrapPolicy wrap_by_size(int64_t min_numel) {
  return [min_numel](const WrapCandidate& candidate) {
    return candidate.is_shard_unit && candidate.numel >= min_numel;
  };
}

// Chooses modules of the given types: wrap_by_type<torch::nn::TransformerEncoderLayerImpl>().
template <typename... Modules>
WrapPolicy wrap_by_type() {
  static_assert(
      (std::is_base_of_v<torch::nn::Module, Modules> && ...),
      "cadre::wrap_by_type<...>(): name the module's own type and not its holder, such as "
      "torch::nn::LinearImpl instead of torch::nn::Linear");
  return [](const WrapCandidate& candidate) {
    return ((dynamic_cast<const Modules*>(&candidate.module) != nullptr) || ...);
  };
}

}  // namespace cadre
