// Backwards with create_graph for functions that have a hand-written backward. The hand-written
// backward cannot be differentiated, so this one differentiates a composition of differentiable
// operations that computes the same function.
//
// Blocking and errors: those of the composition.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

// `inputs` are the tensors that the forward has saved, so they are connected to the graph. An
// undefined input, and one that requires no gradient, gets an undefined gradient. compose(inputs)
// returns the output of the function. It is called with aliases of the inputs, and the gradients
// are taken for the aliases. Otherwise, if one input depends on another one, for example where a
// layer is applied twice, the gradients would also include paths from one input to another, whose
// gradients other nodes compute.
template <typename Composition>
torch::autograd::variable_list recorded_backward(const torch::autograd::variable_list& inputs,
                                                 const at::Tensor& gradient,
                                                 const Composition& compose) {
  torch::autograd::variable_list aliases(inputs.size()), wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    aliases[i] = inputs[i].view_as(inputs[i]);
    if (inputs[i].requires_grad()) wanted.push_back(aliases[i]);
  }
  const torch::autograd::variable_list found =
      torch::autograd::grad({compose(aliases)}, wanted, {gradient}, /*retain_graph=*/true,
                            /*create_graph=*/true, /*allow_unused=*/true);
  torch::autograd::variable_list gradients(inputs.size());
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) gradients[i] = found[next++];
  }
  return gradients;
}

// Runs the body of a backward. The message of an error then begins with the name of the function.
template <typename Body>
torch::autograd::variable_list in_backward_of(std::string_view function, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw error.with_context(format("backward of {}", function));
  }
}

}  // namespace cadre
