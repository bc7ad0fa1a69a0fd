// Gives whole parameters placeholders as gradients, which throw on any access, after the real
// gradients were reduced to shards. Without them, an optimizer that was made from the whole
// parameters would find no gradients, skip every parameter and silently train nothing.
//
// Threads: one at a time. Lifetime: shares the parameters; the destructor removes the placeholders.
// Errors: reading or writing a placeholder throws c10::Error with a text that says what to do.
// Setting a gradient to undefined, as zero_grad() does, is allowed.
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
    std::string place;   // the wrapper and the rank, with which the error begins
    std::string remedy;  // says from which tensors to make the optimizer
  };
  struct Events {
    // Called by remove(), with the index of each parameter whose placeholder the program has
    // cleared.
    std::function<void(size_t)> on_cleared;
    // Called before a backward adds to the parameter's gradient, and when autograd::grad() has
    // computed this gradient.
    std::function<void(size_t)> on_arrival;
  };
  // parameters: leaves that require grad.
  RefusedGradients(const std::vector<NamedTensor>& parameters, const Owner& owner, Events events);
  ~RefusedGradients();
  RefusedGradients(const RefusedGradients&) = delete;
  RefusedGradients& operator=(const RefusedGradients&) = delete;

  // Gives each parameter without a gradient a placeholder, which throws on any access.
  void install();
  // Removes the placeholders. Called before a backward adds to a gradient.
  void remove();
  // Removes the placeholders without calling on_cleared.
  void discard();
  // Returns whether the parameter's gradient is a placeholder.
  bool is_refused(size_t parameter) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::string> sentences_;  // the error text of each placeholder, by parameter
  Events events_;
  std::vector<unsigned> hooks_;  // one hook for each parameter
  // The placeholders, by parameter. The first install() makes them.
  std::vector<at::Tensor> refused_;
  std::vector<bool> is_installed_;  // whether install() has set the placeholder, by parameter
  bool are_installed_ = false;
};

}  // namespace cadre
