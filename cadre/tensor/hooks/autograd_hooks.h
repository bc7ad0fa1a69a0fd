// The hooks of libtorch's autograd that the wrappers use: a call at each gradient, at the start of
// a backward and at its end. Only autograd_hooks.cpp depends on autograd's internals.
//
// Threads: callbacks run in the thread that called backward() (in a pool thread beyond 60 nested
// backwards), one at a time for one backward. Blocking: never. Lifetime: AccumulationHooks removes
// its hooks; it keeps the parameters alive, but no graph. Errors: backward() throws what a callback
// throws. Source: c10d's Reducer, torch/csrc/distributed/c10d/reducer.cpp; docs/decisions/0003.
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

// Identifies the autograd node (grad_fn) of a tensor without keeping the graph alive. A later node
// may get the same address, but never the same sequence number.
struct GraphNode {
  torch::autograd::Node* address;
  uint64_t sequence;
};

// Calls `on_gradient(i)` after a backward has added to the gradient of parameters[i]: once in each
// backward, however often the parameter was used, and not if the gradient is undefined.
class AccumulationHooks {
 public:
  // REQUIRES: every parameter is a leaf that requires grad.
  AccumulationHooks(std::span<const at::Tensor> parameters,
                    std::function<void(size_t)> on_gradient);
  ~AccumulationHooks();  // removes the hooks
  AccumulationHooks(const AccumulationHooks&) = delete;
  AccumulationHooks& operator=(const AccumulationHooks&) = delete;

  void remove();

  // Returns whether any AccumulationHooks has a hook on this leaf now.
  static bool has_hook(const at::Tensor& parameter);

  // Returns whether the backward that runs in this thread reaches a parameter. False for
  // autograd::grad() and for a backward whose `inputs` name none of the parameters. Works also
  // after remove().
  bool current_backward_reaches_a_parameter() const;

  // Returns the index of the first parameter whose hook is lost: a change of its dtype or device
  // has given it a new gradient accumulator without the hook.
  std::optional<size_t> first_lost() const;

 private:
  struct Installed;
  std::vector<Installed> installed_;
  bool are_removed_ = false;
};

// Calls `on_start` when a backward is about to pass through `output`, before it computes a gradient
// of the tensors from which the output was made. Returns the node that the backward passes through;
// nullopt for a leaf or a tensor that does not require grad. A leaf gets no hook: it outlives the
// forward, so the hook would also run in backwards of other forwards.
std::optional<GraphNode> at_start_of_backward(const at::Tensor& output,
                                              std::function<void()> on_start);

// Returns the sequence number that the next node of this thread will get. A thread numbers its
// nodes in the order of their creation.
uint64_t next_sequence();
// Returns the sequence numbers of the nodes in the backward that runs in this thread, ascending.
std::vector<uint64_t> sequences_of_current_backward();

// Returns whether the backward that runs in this thread passes through the node, now or later.
// False for the node from which the backward starts, if there is only one; that node's hook runs
// before all others.
bool current_backward_passes(const GraphNode& node);

// REQUIRES: a backward runs in this thread. `on_end` runs at the end of that backward, after all
// its hooks, before backward() returns. If the backward ends by an exception, `on_failure` runs
// instead; it must not throw.
void at_end_of_backward(std::function<void()> on_end, std::function<void()> on_failure);

// Must be called after a backward of this thread has thrown: releases the graph nodes that the
// backward has not reached. Until the thread's next backward, libtorch keeps the nodes that were
// ready to run in a queue of the thread, and with them the tensors and the process groups of their
// graph. Does nothing during a backward.
CADRE_EXPORT void release_failed_backward();

// Returns whether a backward runs in this thread.
bool is_in_backward();

// Returns whether the backward that runs in this thread was called with create_graph=true.
bool current_backward_creates_graph();

}  // namespace cadre::wrap
