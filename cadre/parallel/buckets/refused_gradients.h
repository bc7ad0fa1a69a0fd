// Stands in the gradients of full parameters after these were reduced to shards, and throws when it
// is touched: an optimizer that was made from the full parameters would find no gradient there,
// leave out every parameter, and train nothing.
//
// Threads: one at a time. Blocking: never. Lifetime: shares the parameters; the destructor removes
// what was installed. Errors: libtorch throws the sentence where a refused gradient is read or
// written. To set a gradient to none is allowed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

class RefusedGradients {
 public:
  struct Owner {
    std::string place;   // with which the sentence begins: the wrapper and the rank
    std::string remedy;  // what to make the optimizer from
  };
  struct Events {
    // From remove(), for each parameter whose refused gradient the program has set to none.
    std::function<void(size_t)> on_cleared;
    // A backward is about to add to the parameter's gradient, or autograd::grad() has computed it.
    std::function<void(size_t)> on_arrival;
  };
  // `parameters`: leaves that require grad.
  RefusedGradients(const std::vector<NamedTensor>& parameters, const Owner& owner, Events events);
  ~RefusedGradients();
  RefusedGradients(const RefusedGradients&) = delete;
  RefusedGradients& operator=(const RefusedGradients&) = delete;

  // Where a parameter has no gradient.
  void install();
  // A backward does this itself before it adds to the gradient of one of the parameters.
  void remove();
  // As remove(), but calls nothing.
  void discard();
  // Whether what stands in the parameter's gradient throws when it is touched.
  bool is_refused(size_t parameter) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> sentences_;  // by parameter
  Events events_;
  std::vector<unsigned> hooks_;      // by parameter
  std::vector<at::Tensor> refused_;  // by parameter, made by the first install()
  std::vector<bool> is_installed_;   // by parameter
  bool are_installed_ = false;
};

}  // namespace cadre
