// The input of a plan: the sizes of a model's parameters and their grouping into units.
//
// Threads: plain values; model_sizes_of() as the module. Errors: kInvalidArgument from
// model_sizes_of().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/shard/flat_layout.h"

namespace cadre {

struct ModelSizes {
  // A module whose parameters FullyShardedDataParallel gathers together.
  struct Unit {
    std::string name;
    size_t parent = 0;  // the enclosing unit, whose index is smaller except for the root
  };

  // Distinct parameters, in the order of the module's named_parameters().
  std::vector<ParameterSize> parameters;
  // The units in the order in which a forward enters them. The first is the root, with the
  // parameters that are in no other unit. Strategies without units ignore the list.
  std::vector<Unit> units = {{.name = "", .parent = 0}};
  int64_t buffer_bytes = 0;  // the module's buffers, which every rank has
};

// Returns the sizes of a module that is not wrapped yet. A module from defer_init() needs no memory
// and stays deferred. Units are the ShardUnits for which fully_shard() was called and those that
// the policy selects, in the order of named_modules(), as in FullyShardedDataParallel.
CADRE_EXPORT ModelSizes model_sizes_of(const std::shared_ptr<torch::nn::Module>& module,
                                       const WrapPolicy& policy = {});

// Takes a module holder.
template <typename Holder>
  requires requires { typename Holder::ContainedType; }
ModelSizes model_sizes_of(const Holder& holder, const WrapPolicy& policy = {}) {
  return model_sizes_of(std::shared_ptr<torch::nn::Module>(holder.ptr()), policy);
}

}  // namespace cadre
