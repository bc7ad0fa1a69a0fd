#include "cadre/parallel/pp/values/stage_values.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <string>
#include <utility>

#include "cadre/tensor/autograd/autograd_node.h"

namespace cadre::parallel {
namespace {

using torch::autograd::variable_list;

class StageInputNode final : public torch::autograd::Node {
 public:
  explicit StageInputNode(const at::Tensor& leaf)
      : Node(torch::autograd::collect_next_edges(leaf)) {}

  variable_list apply(variable_list&& gradients) final { return std::move(gradients); }
  std::string name() const final { return "cadre::PipelineStageInput"; }
};

// Returns another tensor with the same memory that autograd does not treat as a view.
at::Tensor alias_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::alias(tensor);
}

// Returns whether `tensor` is the only reference to its memory. Memory that libtorch has not
// allocated, such as that of from_blob(), belongs to the program, so the result is false for it.
bool is_held_once(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().resizable();
}

}  // namespace

at::Tensor own_values(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return is_held_once(tensor) ? alias_of(tensor) : tensor.detach().clone();
}

at::Tensor forward_input(const at::Tensor& leaf) {
  if (!leaf.requires_grad() || !at::GradMode::is_enabled()) return leaf;
  at::Tensor input = alias_of(leaf);
  torch::autograd::create_gradient_edge(input, make_node<StageInputNode>(leaf));
  return input;
}

}  // namespace cadre::parallel
