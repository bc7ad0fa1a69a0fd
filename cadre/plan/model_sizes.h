// What a plan needs to know of a model: the sizes of its parameters and how they are grouped.
//
// Threads: plain values. All sizes are in elements unless a name says bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cadre/base/types.h"
#include "cadre/parallel/fsdp/options.h"

namespace cadre {

struct PlannedParameter {
  std::string name;
  std::vector<int64_t> sizes;
  DType dtype = DType::kFloat32;
  bool is_trained = true;
  size_t unit = 0;  // of ModelSizes::units; 0 is the root

  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
};

// A module whose parameters FullyShardedDataParallel gathers together.
struct PlannedUnit {
  std::string name;
  size_t parent = 0;  // the unit around it; smaller than its own index, but for the root
};

struct ModelSizes {
  // Distinct, in the order of the module's named_parameters().
  std::vector<PlannedParameter> parameters;
  // In the order in which a forward enters them. The first is the root, of the parameters that no
  // other unit holds. Strategies without units leave them out of account.
  std::vector<PlannedUnit> units = {{.name = "", .parent = 0}};
  int64_t buffer_bytes = 0;  // of the module's buffers, which every rank has
};

// Values that an optimizer keeps, and makes for the time of an update, for each element.
struct OptimizerSizes {
  int states = 2;       // kept, in the dtype of the parameter: 2 for Adam and AdamW, 0 or 1 for SGD
  int temporaries = 0;  // while it updates a parameter: 0 for the fused kernels
};

}  // namespace cadre
