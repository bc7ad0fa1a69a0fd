// The input of a plan: the sizes of a model's parameters and their grouping into units.
//
// Threads: plain values; model_sizes_of() as the module. Blocking: never. Lifetime: values. Errors:
// kInvalidArgument from model_sizes_of(). All sizes are in elements unless a name says bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/parallel/fsdp/options.h"

namespace cadre {

struct PlannedParameter {
  std::string name;
  std::vector<int64_t> sizes;
  DType dtype = DType::kFloat32;
  bool is_trained = true;
  size_t unit = 0;  // index of ModelSizes::units; 0 is the root

  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
};

// A module whose parameters FullyShardedDataParallel gathers together.
struct PlannedUnit {
  std::string name;
  size_t parent = 0;  // the enclosing unit, whose index is smaller except for the root
};

struct ModelSizes {
  // Distinct, in the order of the module's named_parameters().
  std::vector<PlannedParameter> parameters;
  // In the order in which a forward enters them. The first is the root, with the parameters that
  // are in no other unit. Strategies without units ignore them.
  std::vector<PlannedUnit> units = {{.name = "", .parent = 0}};
  int64_t buffer_bytes = 0;  // the module's buffers, which every rank has
};

// The sizes of a module that is not wrapped yet. A module from defer_init() needs no memory and
// stays deferred. Units are the ShardUnits for which fully_shard() was called and those that the
// policy selects, in the order of named_modules(), as in FullyShardedDataParallel.
CADRE_EXPORT ModelSizes model_sizes_of(const std::shared_ptr<torch::nn::Module>& module,
                                       const WrapPolicy& policy = {});

// A module holder.
template <typename Holder>
  requires requires { typename Holder::ContainedType; }
ModelSizes model_sizes_of(const Holder& holder, const WrapPolicy& policy = {}) {
  return model_sizes_of(std::shared_ptr<torch::nn::Module>(holder.ptr()), policy);
}

// The number of values for each element that an optimizer keeps, and that it allocates during an
// update.
struct OptimizerSizes {
  int states = 2;       // kept, in the dtype of the parameter: 2 for Adam and AdamW, 0 or 1 for SGD
  int temporaries = 0;  // while it updates a parameter: 0 for the fused kernels
};

}  // namespace cadre
