// Placeholders for the gradients of full parameters, which throw when they are touched. They are
// set after the real gradients were reduced to shards: an optimizer that was made from the full
// parameters would otherwise find no gradient there, leave out every parameter, and train nothing.
//
// Threads: one at a time. Blocking: never. Lifetime: shares the parameters; the destructor removes
// what was installed. Errors: libtorch throws a sentence where a placeholder is read or written.
// Clearing a gradient, so that it is undefined, is allowed.
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
    std::string place;   // the wrapper and the rank, with which the sentence begins
    std::string remedy;  // names the tensors from which to make the optimizer
  };
  struct Events {
    // remove() calls this for each parameter whose placeholder the program has cleared.
    std::function<void(size_t)> on_cleared;
    // Called when a backward is about to add to the parameter's gradient, or autograd::grad() has
    // computed it.
    std::function<void(size_t)> on_arrival;
  };
  // `parameters` are leaves that require grad.
  RefusedGradients(const std::vector<NamedTensor>& parameters, const Owner& owner, Events events);
  ~RefusedGradients();
  RefusedGradients(const RefusedGradients&) = delete;
  RefusedGradients& operator=(const RefusedGradients&) = delete;

  // Gives each parameter without a gradient one that throws on any access.
  void install();
  // Removes the placeholders. A backward calls this itself before it adds to a gradient.
  void remove();
  // Removes the placeholders without calling on_cleared.
  void discard();
  // Returns whether the parameter's gradient is a placeholder, which throws on any access.
  bool is_refused(size_t parameter) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> sentences_;  // has one sentence for each parameter
  Events events_;
  std::vector<unsigned> hooks_;  // has one hook for each parameter
  // Has one placeholder for each parameter, which the first install() makes.
  std::vector<at::Tensor> refused_;
  std::vector<bool> is_installed_;  // has one flag for each parameter
  bool are_installed_ = false;
};

}  // namespace cadre
