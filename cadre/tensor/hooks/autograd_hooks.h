// What a wrapper asks of libtorch's autograd: a call at each gradient, at the start of a backward
// and at its end. All knowledge of autograd's internals is in autograd_hooks.cpp.
//
// Threads: callbacks run in the thread that called backward() (in a pool thread beyond 60 nested
// backwards), one at a time for one backward. Blocking: never. Lifetime: AccumulationHooks removes
// its hooks; it keeps the parameters alive, but no graph. Errors: what a callback throws leaves
// backward(). Source: c10d's Reducer, torch/csrc/distributed/c10d/reducer.cpp; docs/decisions/0003.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace torch::autograd {
struct Node;
}

#include "cadre/core/base/export.h"

namespace cadre::wrap {

// The node of a graph that made a tensor. It does not keep the graph: the address may be reused,
// the sequence number is not.
struct GraphNode {
  torch::autograd::Node* address;
  uint64_t sequence;
};

// Calls `on_gradient(i)` each time a backward has added to the gradient of parameters[i]: once in a
// backward however often the parameter was used, and never when the gradient is undefined.
class AccumulationHooks {
 public:
  // REQUIRES: every parameter is a leaf that requires grad.
  AccumulationHooks(std::span<const at::Tensor> parameters,
                    std::function<void(size_t)> on_gradient);
  ~AccumulationHooks();  // removes them
  AccumulationHooks(const AccumulationHooks&) = delete;
  AccumulationHooks& operator=(const AccumulationHooks&) = delete;

  void remove();

  // Whether the gradients of this leaf come to hooks of this kind now.
  static bool has_hook(const at::Tensor& parameter);

  // Works also after remove(). For the backward that runs in this thread: false for
  // autograd::grad() and for a backward whose `inputs` name none of the parameters.
  bool current_backward_reaches_a_parameter() const;

  // A parameter whose gradients no longer come here, because a change of its dtype or device has
  // given it another accumulator.
  std::optional<size_t> first_lost() const;

 private:
  struct Installed;
  std::vector<Installed> installed_;
  bool are_removed_ = false;
};

// Calls `on_start` when a backward is about to pass through `output`, before any gradient of what
// made the output. Nothing happens for a tensor that does not require grad, or for a leaf: it
// outlives the forward, and its hook would tell of backwards that have nothing to do with this one.
// Returns the node that the backward passes through.
std::optional<GraphNode> at_start_of_backward(const at::Tensor& output,
                                              std::function<void()> on_start);

// Nodes are numbered in the order in which a thread makes them: the number of the next one.
uint64_t next_sequence();
// Sequence numbers of the nodes in the backward that runs in this thread, ascending.
std::vector<uint64_t> sequences_of_current_backward();

// Whether the backward that runs in this thread passes through the node, sooner or later. False for
// the one node that it starts from, whose hook runs before all others.
bool current_backward_passes(const GraphNode& node);

// To be called inside a backward: `on_end` runs when that backward is done, after all its hooks,
// before it returns; `on_failure` runs instead, and must not throw, if it ends by an exception.
void at_end_of_backward(std::function<void()> on_end, std::function<void()> on_failure);

// After a backward of this thread has thrown: releases the nodes that it has not reached. libtorch
// keeps those that were ready to run in a queue of the thread until the next backward there, and
// with them the tensors and the process groups of the graph behind them. Does nothing during a
// backward.
CADRE_EXPORT void release_failed_backward();

// Whether the backward that runs in this thread was called with create_graph=true.
bool current_backward_creates_graph();

}  // namespace cadre::wrap
