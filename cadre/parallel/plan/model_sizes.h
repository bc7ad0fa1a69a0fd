// Defines the input of a memory plan: the sizes of a model's parameters, and its units.
//
// Threads: model_sizes_of() as the module. Errors: model_sizes_of() throws kInvalidArgument.
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
    // The index of the innermost unit around this one; smaller than its own index, except for the
    // root.
    size_t parent = 0;
  };

  // The distinct parameters, in the order of the module's named_parameters().
  std::vector<ParameterSize> parameters;
  // The units, in the order in which a forward calls them. The first one is the root, which has the
  // parameters that are in no other unit. Only fsdp and hsdp use this list.
  std::vector<Unit> units = {{.name = "", .parent = 0}};
  int64_t buffer_bytes = 0;  // the size of the module's buffers, which every rank has
};

// Returns the sizes of a module that is not wrapped yet. The module may be deferred (defer_init()):
// it then needs no memory, and stays deferred. As in FullyShardedDataParallel, the units are the
// ShardUnits for which fully_shard() was called, and those that the policy selects, in the order of
// named_modules().
CADRE_EXPORT ModelSizes model_sizes_of(const std::shared_ptr<torch::nn::Module>& module,
                                       const WrapPolicy& policy = {});

// Does the same for a module in a holder.
template <typename Holder>
  requires requires { typename Holder::ContainedType; }
ModelSizes model_sizes_of(const Holder& holder, const WrapPolicy& policy = {}) {
  return model_sizes_of(std::shared_ptr<torch::nn::Module>(holder.ptr()), policy);
}

}  // namespace cadre
