#include "cadre/tensor/hooks/autograd_hooks.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace cadre::wrap {

namespace {

using torch::autograd::variable_list;

// The type is std::shared_ptr<Node> up to torch 2.12 and c10::intrusive_ptr<Node> from 2.13 on.
using NodePointer = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

class PostHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit PostHook(std::function<void()> on_gradient) : on_gradient_(std::move(on_gradient)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    // The hook is not called for an undefined gradient, which a custom Function may return for a
    // leaf: the leaf's gradient has not changed.
    if (!inputs.empty() && inputs[0].defined()) on_gradient_();
    return outputs;
  }

 private:
  std::function<void()> on_gradient_;
};

// Calls on_end, or on_failure in its destructor: the engine's callback owns this object, and if the
// backward ends by an exception the engine destroys the callback without running it.
struct EndOfBackward {
  std::function<void()> on_end;
  std::function<void()> on_failure;
  bool has_run = false;

  ~EndOfBackward() {
    if (!has_run) on_failure();
  }
};

}  // namespace

// A hook on the gradient accumulator of a parameter. The object keeps the accumulator alive,
// because the tensor has only a weak reference to it.
struct AccumulationHooks::Installed {
  at::Tensor parameter;
  NodePointer accumulator;
  uintptr_t key;
};

AccumulationHooks::AccumulationHooks(std::span<const at::Tensor> parameters,
                                     std::function<void(size_t)> on_gradient) {
  installed_.reserve(parameters.size());
  try {
    for (size_t i = 0; i < parameters.size(); ++i) {
      NodePointer accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
      const uintptr_t key = accumulator->add_post_hook(
          std::make_unique<PostHook>([on_gradient, i] { on_gradient(i); }));
      installed_.push_back({parameters[i], std::move(accumulator), key});
    }
  } catch (...) {
    // If a constructor throws, the destructor does not run. Without remove(), the hooks would call
    // a destroyed object.
    remove();
    throw;
  }
}

AccumulationHooks::~AccumulationHooks() {
  remove();
}

void AccumulationHooks::remove() {
  if (std::exchange(are_removed_, true)) return;
  for (const Installed& hook : installed_) hook.accumulator->del_post_hook(hook.key);
}

bool AccumulationHooks::has_hook(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return false;
  return std::ranges::any_of(accumulator->post_hooks(), [](const auto& hook) {
    return dynamic_cast<const PostHook*>(hook.get()) != nullptr;
  });
}

bool AccumulationHooks::current_backward_reaches_a_parameter() const {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  // A backward() without a list of inputs runs every node.
  if (exec_info == nullptr || exec_info->empty()) return true;
  for (const Installed& hook : installed_) {
    const auto found = exec_info->find(hook.accumulator.get());
    if (found != exec_info->end() && found->second.needed_) return true;
  }
  return false;
}

std::optional<size_t> AccumulationHooks::first_lost() const {
  for (size_t i = 0; i < installed_.size(); ++i) {
    const auto current = torch::autograd::impl::try_get_grad_accumulator(installed_[i].parameter);
    if (current.get() != installed_[i].accumulator.get()) return i;
  }
  return std::nullopt;
}

std::optional<GraphNode> at_start_of_backward(const at::Tensor& output,
                                              std::function<void()> on_start) {
  if (!output.defined() || !output.requires_grad() || output.is_leaf()) return std::nullopt;
  output.register_hook([on_start = std::move(on_start)](const at::Tensor&) { on_start(); });
  torch::autograd::Node& node = *output.grad_fn();
  return GraphNode{.address = &node, .sequence = node.sequence_nr()};
}

uint64_t next_sequence() {
  return at::sequence_number::peek();
}

std::vector<uint64_t> sequences_of_current_backward() {
  std::vector<uint64_t> sequences;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return sequences;
  sequences.reserve(nodes->size());
  for (const torch::autograd::Node* node : *nodes) sequences.push_back(node->sequence_nr());
  std::ranges::sort(sequences);
  return sequences;
}

bool current_backward_passes(const GraphNode& node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return false;
  const auto found = nodes->find(node.address);
  if (found == nodes->end() || (*found)->sequence_nr() != node.sequence) return false;
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  // A backward() without a list of inputs runs every node.
  if (exec_info == nullptr || exec_info->empty()) return true;
  const auto info = exec_info->find(node.address);
  return info != exec_info->end() && info->second.needed_;
}

void at_end_of_backward(std::function<void()> on_end, std::function<void()> on_failure) {
  auto end = std::make_shared<EndOfBackward>();
  end->on_end = std::move(on_end);
  end->on_failure = std::move(on_failure);
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    end->has_run = true;
    end->on_end();
  });
}

void release_failed_backward() {
  if (is_in_backward()) return;
  const at::AutoGradMode grad_mode(true);
  // The start of any backward empties the queue.
  at::zeros({}).requires_grad_(true).alias().backward();
}

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

bool current_backward_creates_graph() {
  return at::GradMode::is_enabled();
}

}  // namespace cadre::wrap
