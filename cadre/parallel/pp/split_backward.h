// A backward in two passes: first the gradients of a stage's inputs, later those of its weights.
// The zero-bubble schedules send the first ones early and fill the bubble with the second ones.
//
// An *owner* is a node of the graph from which an input is reached, and along another of its edges
// a weight without passing an input's node: the product of a linear layer, for example. The input
// pass asks the engine for the gradients that arrive at the inputs and at the owners, so that it
// computes no gradient of a weight. The weight pass starts at each owner with the gradient captured
// there, and computes the gradients of this owner's weights only. One pass for all owners would be
// wrong: a gradient that flows through one owner to another would be counted once for each path.
//
// A weight that several owners use (a matrix used twice in one stage) cannot be separated so, and
// gets its gradient in the input pass; the sum is right, only earlier than the schedule asks. The
// same holds for the weights inside of an ActivationCheckpoint, and for those that its arguments
// are computed from, because its backward computes all at once. Without an input that requires
// grad, the weight pass is the whole backward.
//
// Threads: the constructor, input_pass() and weight_pass() in one thread. Blocking: never by
// itself. Lifetime: keeps the graph with its saved tensors until it is destroyed. Errors: those of
// the operations' backwards. Source: torch/distributed/pipelining/_backward.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace cadre::parallel {

// Keeps the graph edges of outputs, so that the values of the outputs need not be kept.
class StageGraph {
 public:
  // inputs: leaves of the graph.
  StageGraph(const std::vector<at::Tensor>& outputs, std::vector<at::Tensor> inputs);
  ~StageGraph();
  StageGraph(StageGraph&&) noexcept;
  StageGraph& operator=(StageGraph&&) noexcept;

  // Runs the whole backward, which adds to the gradients of the parameters. gradients: by output;
  // undefined for an output that has none, and ignored for one that does not require grad. Returns
  // the gradients of the inputs, by input; undefined for an input that no gradient has reached.
  // Called at most once, and not together with input_pass() and weight_pass().
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& gradients);
  // Runs the input pass. Returns what backward() returns.
  std::vector<at::Tensor> input_pass(const std::vector<at::Tensor>& gradients);
  // Runs the weight pass. Called after input_pass(), once.
  void weight_pass();

 private:
  struct State;
  std::unique_ptr<State> state_;  // has types of autograd, which the header leaves out
};

}  // namespace cadre::parallel
