#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/layout.h"
#include "cadre/tensor/mesh/redistribute.h"

namespace cadre {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Wraps a Redistribution so that an autograd context can save it.
struct HeldMove : torch::CustomClassHolder {
  explicit HeldMove(Redistribution held) : move(std::move(held)) {}
  const Redistribution move;
};

// Returns the placements of the gradient of a tensor with these placements. A Partial becomes
// Replicate: each operand of a sum gets the gradient of the sum.
std::vector<Placement> of_gradient(std::span<const Placement> placements) {
  std::vector<Placement> result;
  for (const Placement& placement : placements) {
    result.push_back(placement.partial() ? Placement(Replicate()) : placement);
  }
  return result;
}

// Returns the gradient with the factor that Partial(avg) axes cause: each operand of a mean gets
// the gradient of the mean divided by the number of operands. An axis that is Partial(avg) both
// before and after has no effect and is left out, because multiplying and dividing by its size
// could overflow or round.
at::Tensor scaled_for_means(const at::Tensor& gradient, const Redistribution& move) {
  const auto is_mean = [](const Placement& placement) {
    return placement.partial() != nullptr && placement.partial()->op == ReduceOp::kAvg;
  };
  int64_t before = 1;
  int64_t after = 1;
  for (size_t axis = 0; axis < move.from.size(); ++axis) {
    if (is_mean(move.from[axis]) == is_mean(move.to[axis])) continue;
    (is_mean(move.from[axis]) ? before : after) *= move.mesh.shape()[axis];
  }
  if (before == after) return gradient;
  if (after % before == 0) return gradient.mul(after / before);
  return gradient.div(static_cast<double>(before) / static_cast<double>(after));
}

struct Redistribute : torch::autograd::Function<Redistribute> {
  // `anchor` requires grad, so that autograd creates the node on every rank even if `local` does
  // not require grad there: every rank must take part in the collectives of the backward.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local,
                            const at::Tensor& anchor, const c10::intrusive_ptr<HeldMove>& held) {
    static_cast<void>(anchor);
    context->saved_data["move"] = c10::IValue::make_capsule(held);
    return redistribute_values(held->move, local);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto capsule = context->saved_data["move"].toCapsule();
    const Redistribution& move = static_cast<const HeldMove*>(capsule.get())->move;
    // This call is differentiable itself, for create_graph=true. Without create_graph, autograd
    // switches grad mode off in a backward, so the call records no graph.
    const at::Tensor gradient = redistribute_through_autograd(
        {move.mesh, move.sizes, of_gradient(move.to), of_gradient(move.from)}, gradients[0],
        std::nullopt);
    return {scaled_for_means(gradient, move), at::Tensor(), at::Tensor()};
  }
};

// Returns whether `local` requires grad on any rank. Costs one all_reduce along each axis along
// which the backward may have to communicate.
bool requires_grad_on_any_rank(const Redistribution& move, bool is_required_here) {
  const DeviceMesh& mesh = move.mesh;
  const PlacementLayout from(mesh.shape(), move.from, move.sizes.size());
  const std::vector<size_t> involved =
      from.involved_axes(PlacementLayout(mesh.shape(), move.to, move.sizes.size()));
  const at::Tensor flag = at::full({1}, is_required_here ? 1 : 0, at::kByte);
  for (size_t axis = 0; axis < mesh.shape().size(); ++axis) {
    const bool is_concerned =
        move.from[axis] != move.to[axis] || std::ranges::find(involved, axis) != involved.end();
    if (!is_concerned || mesh.shape()[axis] == 1) continue;
    mesh.group(mesh.axes()[axis].name).all_reduce(flag, {.op = ReduceOp::kMax});
  }
  return flag.const_data_ptr<uint8_t>()[0] != 0;
}

void check_has_derivative(std::span<const Placement> placements) {
  for (const Placement& placement : placements) {
    const Partial* partial = placement.partial();
    if (partial == nullptr || partial->op == ReduceOp::kSum || partial->op == ReduceOp::kAvg) {
      continue;
    }
    throw Error(ErrorCode::kInvalidArgument,
                format("redistribute: a tensor that requires grad is {}: only Partial(sum) and "
                       "Partial(avg) have a derivative here; detach() it, or reduce with "
                       "operations that autograd knows",
                       to_string(placement)));
  }
}

}  // namespace

at::Tensor redistribute_through_autograd(const Redistribution& move, const at::Tensor& local,
                                         std::optional<bool> requires_grad) {
  if (move.from == move.to) return local;
  const bool may_require_grad =
      at::GradMode::is_enabled() && torch::autograd::isDifferentiableType(local.scalar_type());
  const bool is_required =
      may_require_grad &&
      (requires_grad ? *requires_grad : requires_grad_on_any_rank(move, local.requires_grad()));
  if (!is_required) return redistribute_values(move, local);
  check_has_derivative(move.from);
  check_has_derivative(move.to);
  const at::Tensor anchor = at::zeros({0}, local.options()).requires_grad_(true);
  return Redistribute::apply(local, anchor, c10::make_intrusive<HeldMove>(move));
}

}  // namespace cadre
