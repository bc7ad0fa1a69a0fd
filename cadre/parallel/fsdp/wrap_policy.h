// Provides policies that choose which modules of a model become units. Any function that takes a
// WrapCandidate and returns a bool or FullyShardOptions is a policy, too.
//
// Each policy has a parameter for the options of the units that it chooses, such as
// wrap_by_name({"encoder.layers.*"}, {.reshard = Reshard::kAfterBackward}).
//
// Threads: any; policies are pure. Errors: kInvalidArgument for an empty pattern. Source:
// torch.distributed.fsdp.wrap.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/fsdp/options.h"

namespace cadre {

// Returns `options` if the candidate becomes a unit.
inline WrapChoice unit_if(bool is_unit, const FullyShardOptions& options) {
  return is_unit ? WrapChoice(options) : WrapChoice(false);
}

// Chooses the modules of the types ShardUnit<M>.
inline WrapPolicy wrap_shard_units(FullyShardOptions options = {}) {
  return [options](const WrapCandidate& candidate) {
    return unit_if(candidate.is_shard_unit, options);
  };
}

// Chooses modules whose parameters have at least min_numel elements, without the parameters of
// units inside of them.
inline WrapPolicy wrap_by_size(int64_t min_numel, FullyShardOptions options = {}) {
  return [min_numel, options](const WrapCandidate& candidate) {
    return unit_if(candidate.numel >= min_numel, options);
  };
}

// Chooses modules of the given types: wrap_by_type<torch::nn::TransformerEncoderLayerImpl>().
template <typename... Modules>
WrapPolicy wrap_by_type(FullyShardOptions options = {}) {
  static_assert(
      (std::is_base_of_v<torch::nn::Module, Modules> && ...),
      "cadre::wrap_by_type<...>(): name the module's own type and not its holder, such as "
      "torch::nn::LinearImpl instead of torch::nn::Linear");
  return [options](const WrapCandidate& candidate) {
    return unit_if(((dynamic_cast<const Modules*>(&candidate.module) != nullptr) || ...), options);
  };
}

// Chooses modules whose names match one of the patterns. In a pattern, `*` stands for any text
// without a dot: "layers.*" matches "layers.3" and not "layers.3.linear1".
CADRE_EXPORT WrapPolicy wrap_by_name(std::vector<std::string> patterns,
                                     FullyShardOptions options = {});

// Chooses the layers of a model: the modules that a torch::nn::Sequential, ModuleList or ModuleDict
// holds, and for a container that holds others, the modules in those. A module inside of a layer is
// no layer.
CADRE_EXPORT WrapPolicy wrap_layers(FullyShardOptions options = {});

}  // namespace cadre
