// Splits a backward into two passes: the input pass computes the gradients of a stage's inputs, and
// the weight pass computes those of its weights later. The zero-bubble schedules send the input
// gradients early and use the bubble to compute the weight gradients.
//
// An *owner* is a graph node with one edge from which an input is reached, and another edge from
// which a weight, but no input, is reached. An example is the matrix product of a linear layer. The
// input pass asks the autograd engine for the gradients that arrive at the inputs and at the
// owners, so it computes no gradients of weights. The weight pass starts at each owner with the
// gradient captured there, and computes the gradients of this owner's weights only. One backward
// from all owners together would be wrong: if a gradient flows through one owner to another one, it
// would be counted once for each path.
//
// If a weight has several owners (a matrix used twice in one stage), this is not possible, and the
// input pass computes its gradient; the result is the same, only earlier than the schedule asks.
// The same is true for the weights inside an ActivationCheckpoint and for weights from which its
// arguments are computed, because the backward of a checkpoint computes all gradients at once. If
// no input requires grad, the input pass does nothing, and the weight pass is the whole backward.
//
// Threads: the constructor, input_pass() and weight_pass() in one thread. Lifetime: keeps the graph
// with its saved tensors until it is destroyed. Errors: those of the operations' backwards. Source:
// torch/distributed/pipelining/_backward.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace cadre::parallel {

// Keeps the graph edges of the outputs instead of the outputs, so that the memory of the outputs
// can be freed.
class StageGraph {
 public:
  // inputs: leaves of the graph.
  StageGraph(const std::vector<at::Tensor>& outputs, std::vector<at::Tensor> inputs);
  ~StageGraph();
  StageGraph(StageGraph&&) noexcept;
  StageGraph& operator=(StageGraph&&) noexcept;

  // Runs the whole backward, which adds to the gradients of the parameters. `gradients` has one
  // entry for each output: undefined if the output has no gradient, ignored if the output does not
  // require grad. Returns one gradient for each input, undefined if no gradient has reached the
  // input. Call it at most once, and not together with input_pass() and weight_pass().
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients);
  // Runs the input pass. Takes and returns the same as backward().
  std::vector<at::Tensor> input_pass(const std::vector<at::Tensor>& gradients);
  // Runs the weight pass. Call it once, after input_pass().
  void weight_pass();

 private:
  struct State;
  std::unique_ptr<State> state_;  // hidden: it needs headers of autograd
};

}  // namespace cadre::parallel
