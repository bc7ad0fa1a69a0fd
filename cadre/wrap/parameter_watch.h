// Notices that the parameters of a module are no longer those that were wrapped: one that came,
// went, was replaced or has another form would train without being reduced, or be reduced wrongly.
//
// Threads: as the module. Blocking: never. Lifetime: shares the module and its parameters.
// Errors: none; a change comes back in words. Cost: a look at each parameter and, for a module with
// children, one allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace cadre::wrap {

class ParameterWatch {
 public:
  explicit ParameterWatch(std::shared_ptr<const torch::nn::Module> module);

  // "\"fc.bias\" was added": the first difference from what was there at construction. Other values
  // are no difference, and neither is a parameter that was frozen since.
  std::optional<std::string> change() const;

 private:
  struct Known {
    std::string name;
    at::Tensor tensor;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    bool requires_grad;
    std::string text;  // of the form, for messages
  };

  static std::optional<std::string> change_of(const Known& known);
  bool has_the_same_list() const;
  std::optional<std::string> change_of_list() const;

  std::shared_ptr<const torch::nn::Module> module_;
  std::vector<Known> known_;  // in the order of named_parameters()
};

}  // namespace cadre::wrap
