// Finds the gradients of a wrapped model. Depending on the wrapper, they belong to the shards that
// each rank owns, or to the parameters, whole and equal on all ranks. Functions that read the
// gradients of any wrapper use this.
//
// Threads: one at a time for the same model. Lifetime: shares the tensors.
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

// Calls of_whole(model) if each rank has whole gradients, else of_shards(std::span<const
// ParameterShard>). of_whole must be a generic lambda, because it must compile for models without
// parameters().
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
