// The parameters and buffers of a module by name, each tensor once.
//
// Threads: as the module. Blocking: never. Lifetime: shares the tensors. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cadre/core/base/export.h"

namespace torch::nn {
class Module;
}

namespace cadre {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// Returns the tensors in the order of named_parameters() or named_buffers(). A tensor that is
// registered under two names (a tied weight) has the first of them.
CADRE_EXPORT std::vector<NamedTensor> distinct_parameters(const torch::nn::Module& module);
CADRE_EXPORT std::vector<NamedTensor> distinct_buffers(const torch::nn::Module& module);

}  // namespace cadre
