// Finds the gradients of a wrapped model, which are in the shards that its ranks own, or, whole and
// the same on all ranks, in its parameters. Functions that read the gradients of any wrapper use
// this.
//
// Threads: one for the same model. Blocking: never. Lifetime: shares the tensors. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::shard {

template <HasGradients Model>
bool has_whole_gradients(Model& model) {
  if constexpr (HasFlatParameters<Model> && HasParameters<Model>) {
    return WrapperAccess::flat_parameters(model).empty();
  } else {
    return !HasParameterShards<Model>;
  }
}

// Calls of_shards(std::span<const ParameterShard>), or, if each rank has whole gradients,
// of_whole(model). of_whole is a generic lambda, because not every model has parameters().
template <HasGradients Model, typename OfShards, typename OfWhole>
auto with_gradients_of(Model& model, const OfShards& of_shards, const OfWhole& of_whole) {
  if constexpr (HasParameterShards<Model>) {
    if (!has_whole_gradients(model)) {
      const std::vector<ParameterShard> shards = model.parameter_shards();
      return of_shards(std::span<const ParameterShard>(shards));
    }
  }
  if constexpr (HasParameters<Model>) {
    return of_whole(model);
  } else {
    return of_shards({});
  }
}

// Returns the parameters of a wrapper or of a plain module, with their names.
template <typename Model>
std::vector<NamedTensor> named_parameters_of(Model& model) {
  std::vector<NamedTensor> named;
  const auto add = [&named](const auto& list) {
    for (const auto& item : list) named.push_back({item.key(), item.value()});
  };
  if constexpr (requires { model.module()->named_parameters(); }) {
    add(model.module()->named_parameters());
  } else {
    add(model.named_parameters());
  }
  return named;
}

}  // namespace cadre::shard
