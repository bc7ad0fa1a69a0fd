// The backward of a function with a hand-written backward, for the case that autograd records the
// backward itself (create_graph): it differentiates a composition of differentiable operations that
// computes the same function.
//
// Threads: as backward(). Blocking: as the composition. Lifetime: keeps nothing.
// Errors: those of the composition.
#pragma once

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

// inputs: as saved by the forward, so that they are connected to the graph; an undefined one and
// one without a gradient get an undefined gradient. compose(inputs) returns the output of the
// function. It gets aliases of the inputs, and the gradients are those of the aliases: an input may
// depend on another one, for example where a layer is applied twice, and the paths between them
// belong to other nodes.
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

// Runs the body of a backward; an error then names the function.
template <typename Body>
torch::autograd::variable_list in_backward_of(std::string_view function, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw error.with_context(format("backward of {}", function));
  }
}

}  // namespace cadre
