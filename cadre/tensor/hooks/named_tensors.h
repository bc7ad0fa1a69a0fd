// Lists the parameters and buffers of a module by name, each tensor once, finds a module that
// another one shares, and matches names with patterns.
//
// Threads: as the module. Blocking: never. Lifetime: shares the tensors. Errors: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
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

// Returns the number of elements of all tensors together, as for the size of a model.
CADRE_EXPORT int64_t num_elements(const std::vector<at::Tensor>& tensors);

// A module whose forward() uses another module of the model that it has not registered, such as a
// head that is tied to an embedding. If both registered it, parameters() would list its tensors
// twice, and an optimizer would step them twice.
class CADRE_EXPORT SharingModule {
 public:
  virtual ~SharingModule() = default;
  // Returns the other module; null if there is none.
  virtual std::shared_ptr<torch::nn::Module> shared_module() const = 0;
};

namespace wrap {

// Returns whether the whole name of a module or parameter matches the pattern, in which `*` stands
// for any text without a dot: "blocks.*" matches "blocks.3". Takes at most the product of the two
// lengths.
bool matches_pattern(std::string_view pattern, std::string_view name);

}  // namespace wrap
}  // namespace cadre
