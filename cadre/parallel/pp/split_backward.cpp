#include "cadre/parallel/pp/split_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cadre/tensor/hooks/activations/activation_checkpoint.h"

namespace cadre::parallel {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

// An owner, which is the operation between the path of the input and a weight, and the weights that
// only this owner uses.
struct OwnedWeights {
  edge_list owner;    // the owner's inputs, one edge for each gradient that arrives there
  edge_list weights;  // the weights that have no other owner
};

// Finds the owner of each weight of a graph, as defined in the header.
class GraphParts {
 public:
  GraphParts(const edge_list& roots, const std::vector<at::Tensor>& inputs) {
    for (const at::Tensor& input : inputs) {
      if (input.requires_grad()) {
        input_nodes_.insert(torch::autograd::impl::gradient_edge(input).function.get());
      }
    }
    for (const Edge& root : roots) visit(root.function.get());
    for (const Edge& root : roots) {
      if (!reaches_input(root.function.get())) add_weights(root, nullptr);
    }
    for (Node* const node : finished_) {
      if (!reaches_input(node)) continue;
      if (is_checkpoint(*node)) allow_partial_backward(*node);
      for (const Edge& edge : node->next_edges()) {
        if (!edge.is_valid() || reaches_input(edge.function.get())) continue;
        // The backward of an activation checkpoint adds to the gradients of weights that are not in
        // this graph, so it must run only once, in the input pass. Therefore its weights count as
        // having no owner.
        add_weights(edge, is_checkpoint(*node) ? nullptr : node);
      }
    }
  }

  bool contains(Node* node) const { return reaches_input_.contains(node); }

  // Returns the weights that have exactly one owner, grouped by owner.
  std::vector<OwnedWeights> owned() const {
    // The key is the position of the owner in the order in which nodes were visited.
    std::map<size_t, OwnedWeights> by_owner;
    for (const auto& [weight, owners] : owners_) {
      if (!has_one_owner(owners)) continue;
      Node* const owner = *owners.begin();
      OwnedWeights& entry = by_owner[places_.at(owner)];
      if (entry.owner.empty()) {
        for (const uint32_t input : used_inputs_.at(owner)) {
          entry.owner.emplace_back(owner->getptr(), input);
        }
      }
      entry.weights.emplace_back(weight->getptr(), 0);
    }
    std::vector<OwnedWeights> result;
    for (auto& [place, entry] : by_owner) result.push_back(std::move(entry));
    return result;
  }

  // Returns the weights whose gradients the input pass has to compute.
  edge_list shared() const {
    edge_list edges;
    for (const auto& [weight, owners] : owners_) {
      if (!has_one_owner(owners)) edges.emplace_back(weight->getptr(), 0);
    }
    return edges;
  }

  void add_used_input(const Edge& edge) { used_inputs_[edge.function.get()].insert(edge.input_nr); }

 private:
  static bool has_one_owner(const std::set<Node*>& owners) {
    return owners.size() == 1 && *owners.begin() != nullptr;
  }
  bool reaches_input(Node* node) const { return reaches_input_.at(node); }

  // Visits the graph depth first. The path is kept in a vector instead of the thread's stack,
  // because graphs can be too deep for recursion.
  void visit(Node* root) {
    std::vector<std::pair<Node*, size_t>> path;
    const auto enter = [&](Node* node) {
      if (reaches_input_.contains(node)) return;
      reaches_input_[node] = input_nodes_.contains(node);
      path.emplace_back(node, 0);
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->num_outputs()) {
        const Edge& edge = node->next_edge(next++);
        if (!edge.is_valid()) continue;
        add_used_input(edge);
        enter(edge.function.get());
        continue;
      }
      Node* const done = node;
      path.pop_back();
      for (const Edge& edge : done->next_edges()) {
        if (edge.is_valid() && reaches_input_.at(edge.function.get())) reaches_input_[done] = true;
      }
      places_[done] = finished_.size();
      finished_.push_back(done);
    }
  }

  // Called for an edge to a node from which no input is reached. Records `owner` as an owner of
  // every weight that the edge leads to. `owner` is null for a root of the graph, and for a
  // checkpoint.
  void add_weights(const Edge& edge, Node* owner) {
    std::vector<Node*> open{edge.function.get()};
    std::unordered_set<Node*> seen(open.begin(), open.end());
    while (!open.empty()) {
      Node* const node = open.back();
      open.pop_back();
      if (dynamic_cast<AccumulateGrad*>(node) != nullptr) owners_[node].insert(owner);
      for (const Edge& next : node->next_edges()) {
        if (next.is_valid() && seen.insert(next.function.get()).second) {
          open.push_back(next.function.get());
        }
      }
    }
  }

  std::unordered_set<Node*> input_nodes_;
  std::unordered_map<Node*, bool> reaches_input_;  // one entry for each node of the graph
  std::vector<Node*> finished_;                    // the nodes in postorder
  std::unordered_map<Node*, size_t> places_;
  std::unordered_map<Node*, std::set<uint32_t>> used_inputs_;
  // The owners of each weight. The key is the weight's AccumulateGrad node.
  std::unordered_map<Node*, std::set<Node*>> owners_;
};

// The gradients that the input pass has captured at an owner, and the weights whose gradients the
// weight pass computes from them.
struct PendingWeights {
  edge_list owner;
  variable_list gradients;
  edge_list weights;
};

}  // namespace

struct StageGraph::State {
  // One edge for each output; the edge is invalid if the output does not require grad.
  edge_list outputs;
  std::vector<at::Tensor> inputs;  // leaves
  // The captured gradients from which the weight pass starts.
  std::vector<PendingWeights> pending = {};
  edge_list whole_roots = {};  // the roots, if the weight pass runs the whole backward
  variable_list whole_gradients = {};

  bool has_differentiable_input() const {
    return std::ranges::any_of(inputs,
                               [](const at::Tensor& input) { return input.requires_grad(); });
  }

  // Returns the edges at which a backward starts, and their gradients.
  std::pair<edge_list, variable_list> roots_of(const std::vector<at::Tensor>& gradients) const {
    std::pair<edge_list, variable_list> roots;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].is_valid() || !gradients[i].defined()) continue;
      roots.first.push_back(outputs[i]);
      roots.second.push_back(gradients[i]);
    }
    return roots;
  }

  std::vector<at::Tensor> take_input_gradients() {
    std::vector<at::Tensor> result;
    for (const at::Tensor& input : inputs) {
      result.push_back(input.requires_grad() ? std::exchange(input.mutable_grad(), {})
                                             : at::Tensor());
    }
    return result;
  }
};

StageGraph::StageGraph(const std::vector<at::Tensor>& outputs, std::vector<at::Tensor> inputs)
    : state_(std::make_unique<State>(State{.outputs = {}, .inputs = std::move(inputs)})) {
  for (const at::Tensor& output : outputs) {
    state_->outputs.push_back(output.requires_grad() ? torch::autograd::impl::gradient_edge(output)
                                                     : Edge());
  }
}

StageGraph::~StageGraph() = default;
StageGraph::StageGraph(StageGraph&&) noexcept = default;
StageGraph& StageGraph::operator=(StageGraph&&) noexcept = default;

std::vector<at::Tensor> StageGraph::backward(const std::vector<at::Tensor>& gradients) {
  const auto [roots, root_gradients] = state_->roots_of(gradients);
  if (!roots.empty()) {
    Engine::get_default_engine().execute(roots, root_gradients, /*keep_graph=*/false,
                                         /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  return state_->take_input_gradients();
}

std::vector<at::Tensor> StageGraph::input_pass(const std::vector<at::Tensor>& gradients) {
  auto [roots, root_gradients] = state_->roots_of(gradients);
  if (roots.empty()) return state_->take_input_gradients();
  if (!state_->has_differentiable_input()) {
    state_->whole_roots = std::move(roots);
    state_->whole_gradients = std::move(root_gradients);
    return state_->take_input_gradients();
  }
  GraphParts parts(roots, state_->inputs);
  for (const Edge& root : roots) parts.add_used_input(root);
  const std::vector<OwnedWeights> owned = parts.owned();
  const edge_list shared = parts.shared();
  edge_list wanted = shared;
  std::vector<at::Tensor> used_inputs;
  for (const at::Tensor& input : state_->inputs) {
    if (!input.requires_grad()) continue;
    const Edge edge = torch::autograd::impl::gradient_edge(input);
    if (!parts.contains(edge.function.get())) continue;
    wanted.push_back(edge);
    used_inputs.push_back(input);
  }
  for (const OwnedWeights& entry : owned) {
    wanted.insert(wanted.end(), entry.owner.begin(), entry.owner.end());
  }
  if (wanted.empty()) return state_->take_input_gradients();
  const variable_list captured = Engine::get_default_engine().execute(
      roots, root_gradients, /*keep_graph=*/true, /*create_graph=*/false,
      /*accumulate_grad=*/false, wanted);
  const at::NoGradGuard no_grad;
  size_t next = 0;
  for (const Edge& weight : shared) {
    const at::Tensor& gradient = captured[next++];
    if (gradient.defined()) (*weight.function)(variable_list{gradient});
  }
  for (const at::Tensor& input : used_inputs) input.mutable_grad() = captured[next++];
  for (const OwnedWeights& entry : owned) {
    PendingWeights pending{.owner = {}, .gradients = {}, .weights = entry.weights};
    for (const Edge& edge : entry.owner) {
      const at::Tensor& gradient = captured[next++];
      if (!gradient.defined()) continue;
      pending.owner.push_back(edge);
      pending.gradients.push_back(gradient);
    }
    if (!pending.owner.empty()) state_->pending.push_back(std::move(pending));
  }
  return state_->take_input_gradients();
}

void StageGraph::weight_pass() {
  Engine& engine = Engine::get_default_engine();
  if (!state_->whole_roots.empty()) {
    engine.execute(state_->whole_roots, state_->whole_gradients, /*keep_graph=*/false,
                   /*create_graph=*/false, /*accumulate_grad=*/true);
    return;
  }
  // Owners may share nodes on the paths to their weights, so each call keeps the graph for the next
  // one.
  for (const PendingWeights& pending : state_->pending) {
    engine.execute(pending.owner, pending.gradients, /*keep_graph=*/true, /*create_graph=*/false,
                   /*accumulate_grad=*/true, pending.weights);
  }
}

}  // namespace cadre::parallel
