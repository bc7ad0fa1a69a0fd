#include "cadre/tensor/group/backward/differentiable.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/autograd/autograd_node.h"
#include "cadre/tensor/group/backward/backward_collectives.h"
#include "cadre/tensor/group/operands/tensor_checks.h"

namespace cadre::functional {
namespace {

using torch::autograd::variable_list;

// Maps (gradient of the output, saved tensor) to the gradient of the input. Consists of
// differentiable operations, so that double backward (create_graph) works.
using Backward = std::function<at::Tensor(const at::Tensor& gradient, const at::Tensor& saved)>;

// The loss that backward differentiates: the sum of the losses of this group's ranks, or, without a
// group, one loss that all ranks compute identically.
struct Losses {
  std::optional<ProcessGroup> summed_over;
};
const Losses kOneLoss{};

// A node of the graph with one input and one output. A torch::autograd::Function would create no
// node if the input does not require grad, and this rank would not take part in the collective of
// the backward.
class CollectiveNode final : public torch::autograd::Node {
 public:
  // saved: a tensor that the backward needs; undefined if it needs none.
  CollectiveNode(std::string operation, Losses losses, Backward backward, const at::Tensor& saved)
      : operation_(std::move(operation)),
        losses_(std::move(losses)),
        backward_(std::move(backward)) {
    if (saved.defined()) saved_ = torch::autograd::SavedVariable(saved, /*is_output=*/false);
  }

  variable_list apply(variable_list&& gradients) override {
    // An undefined gradient counts as zero. The collective must run anyway, because the other ranks
    // wait in it for this rank.
    const at::Tensor gradient =
        gradients[0].defined() ? std::move(gradients[0]) : input_metadata(0).zeros_like();
    gradients.clear();
    if (losses_.summed_over) note_backward_collective(*losses_.summed_over);
    try {
      return {backward_(gradient, saved())};
    } catch (const Error& error) {
      throw error.with_context(format("backward of {}", operation_));
    }
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    saved_.reset_data();
  }

  std::string name() const override { return "cadre::functional::" + operation_; }

 private:
  // Returns the saved tensor; after release_variables(), throws libtorch's error about a second
  // backward.
  at::Tensor saved() {
    const std::lock_guard lock(mutex_);
    return saved_.unpack();
  }

  std::string operation_;
  Losses losses_;
  Backward backward_;
  torch::autograd::SavedVariable saved_;
};

bool records_gradients(const at::Tensor& input) {
  return at::GradMode::is_enabled() && at::isFloatingType(input.scalar_type());
}

// Returns whether grad mode is on and the input requires grad, so that autograd must record the
// operation.
bool is_differentiated(const at::Tensor& input) {
  return records_gradients(input) && input.requires_grad();
}

// Creates a graph node from `input` to `output`.
void attach(at::Tensor& output, const at::Tensor& input, std::string operation, Losses losses,
            Backward backward, const at::Tensor& saved = {}) {
  NodePointer node = make_node<CollectiveNode>(std::move(operation), std::move(losses),
                                               std::move(backward), saved);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::create_gradient_edge(output, std::move(node));
}

// Checks an input of forward or a gradient in backward, and returns it in a form that can be sent:
// a lazy tensor (a negated view, a zero tensor) is copied.
at::Tensor checked_input(const ProcessGroup& group, std::string_view operation,
                         const at::Tensor& input) {
  const at::Tensor checked = input.defined() ? with_values_in_memory(input) : input;
  check_tensor(group.communicator(), operation, kInput, checked);
  // The tangent of forward-mode differentiation would be dropped silently without this check.
  if (!carries_tangent(checked)) return checked;
  refuse_tensor(group.communicator(), operation,
                format("the input {} carries a tangent of forward-mode differentiation, which the "
                       "differentiable collectives do not have; use backward()",
                       shape_of(checked)));
}

// Refuses an operation without a backward. All ranks call it, whether or not their input requires
// grad, so that no rank waits for another.
[[noreturn]] void refuse_backward(const ProcessGroup& group, std::string_view operation,
                                  ReduceOp op, std::string_view remedy) {
  refuse_tensor(group.communicator(), operation,
                format("{} has no backward; {}, or call it under torch::NoGradGuard", op, remedy));
}

at::Tensor contiguous_values(const at::Tensor& input) {
  return input.detach().contiguous();
}

at::Tensor copy_of_values(const at::Tensor& input) {
  return input.detach().clone(at::MemoryFormat::Contiguous);
}

// Returns an empty tensor of shape (rows, ...) for an input of shape (n, ...).
at::Tensor empty_rows(const at::Tensor& input, int64_t rows) {
  std::vector<int64_t> sizes = input.sizes().vec();
  if (sizes.empty()) sizes.push_back(0);
  sizes[0] = rows;
  return at::empty(sizes, input.options());
}

void check_dimension(const ProcessGroup& group, std::string_view operation, const at::Tensor& input,
                     int64_t dim) {
  if (dim >= -input.dim() && dim < input.dim()) return;
  const std::string remedy =
      input.dim() == 0 ? "view({1})"
                       : format("a dimension from {} to {}", -input.dim(), input.dim() - 1);
  refuse_tensor(group.communicator(), operation,
                format("the input {} has no dimension {}; pass {}", shape_of(input), dim, remedy));
}

// Returns the size along `dim` of each rank's part.
int64_t part_size(const ProcessGroup& group, std::string_view operation, const at::Tensor& input,
                  int64_t dim) {
  check_dimension(group, operation, input, dim);
  if (input.size(dim) % group.world_size() == 0) return input.size(dim) / group.world_size();
  refuse_tensor(group.communicator(), operation,
                format("dimension {} of the input {} is no multiple of the world size {}; pad it",
                       dim, shape_of(input), group.world_size()));
}

// Returns the number of rows that are sent to, or received from, each rank; empty splits divide
// them evenly.
std::vector<int64_t> splits_of(const at::Tensor& tensor, const ProcessGroup& group,
                               const std::vector<int64_t>& splits) {
  if (!splits.empty()) return splits;
  return std::vector<int64_t>(static_cast<size_t>(group.world_size()),
                              tensor.size(0) / group.world_size());
}

// The adjoint of broadcast: returns the sum of all inputs on the root, and zeros on other ranks.
at::Tensor reduce_to_root(const at::Tensor& input, const ProcessGroup& group, Rank root) {
  at::Tensor output = copy_of_values(input);
  group.reduce(output, {.root = root});
  if (group.rank() != root) output.zero_();
  if (records_gradients(input)) {
    attach(output, input, "reduce", {group},
           [group, root](const at::Tensor& gradient, const at::Tensor&) {
             return broadcast(gradient, group, {.root = root});
           });
  }
  return output;
}

// The backward of all_reduce with MAX or MIN. holds: a mask of the elements where this rank's input
// is the extremum. One all_reduce sums both the gradients and, for each element, the number of
// ranks that hold the extremum.
at::Tensor extremum_backward(const at::Tensor& gradient, const at::Tensor& holds,
                             const ProcessGroup& group) {
  const at::Tensor part = holds.to(gradient.scalar_type());
  const at::Tensor sums = all_reduce(at::stack({gradient, part}), group);
  const at::Tensor num_holders = sums.select(0, 1);
  // The gradient is selected with at::where() and not multiplied by `part`, because infinity * 0 is
  // NaN. No rank holds an element whose result is NaN, so its gradient is NaN on all ranks.
  const at::Tensor elsewhere =
      at::zeros_like(part).masked_fill(num_holders.eq(0), std::numeric_limits<double>::quiet_NaN());
  return at::where(holds, sums.select(0, 0) / num_holders, elsewhere);
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, const ProcessGroup& group,
                      const AllReduceOptions& options) {
  constexpr std::string_view kName = "all_reduce";
  const at::Tensor input = checked_input(group, kName, tensor);
  const bool records = records_gradients(input);
  if (records && options.op.op() == ReduceOp::kProduct) {
    refuse_backward(group, kName, options.op.op(),
                    "all_gather the inputs and multiply them: view({world_size, ...}).prod(0)");
  }
  at::Tensor output = copy_of_values(input);
  group.all_reduce(output, options);
  if (!records) return output;
  at::Tensor saved;
  Backward backward;
  switch (options.op.op()) {
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      saved = input.detach().eq(output);
      backward = [group](const at::Tensor& gradient, const at::Tensor& holds) {
        return extremum_backward(gradient, holds, group);
      };
      break;
    case ReduceOp::kPremulSum:
      backward = [group, factor = *options.op.factor()](const at::Tensor& gradient,
                                                        const at::Tensor&) {
        return all_reduce(gradient, group) * factor;
      };
      break;
    default:  // the adjoint of SUM or AVG is itself
      backward = [group, op = options.op](const at::Tensor& gradient, const at::Tensor&) {
        return all_reduce(gradient, group, {.op = op});
      };
  }
  attach(output, input, std::string(kName), {group}, std::move(backward), saved);
  return output;
}

at::Tensor all_gather(const at::Tensor& tensor, const ProcessGroup& group,
                      const AllGatherOptions& options) {
  constexpr std::string_view kName = "all_gather";
  const at::Tensor input = checked_input(group, kName, tensor);
  const int64_t rows = input.dim() == 0 ? 1 : input.size(0);
  at::Tensor output = empty_rows(input, rows * group.world_size());
  group.all_gather(output, contiguous_values(input), options);
  if (!records_gradients(input)) return output;
  attach(output, input, std::string(kName), {group},
         [group, sizes = input.sizes().vec()](const at::Tensor& gradient, const at::Tensor&) {
           return reduce_scatter(gradient, group).view(sizes);
         });
  return output;
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const ProcessGroup& group,
                          const ReduceScatterOptions& options) {
  constexpr std::string_view kName = "reduce_scatter";
  const at::Tensor input = checked_input(group, kName, tensor);
  const bool records = records_gradients(input);
  const ReduceOp op = options.op.op();
  const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum;
  if (records && !is_sum) {
    refuse_backward(group, kName, options.op.op(),
                    "exchange the parts with all_to_all and reduce them: "
                    "view({world_size, ...}).amax(0), .amin(0) or .prod(0)");
  }
  at::Tensor output = empty_rows(input, part_size(group, kName, input, 0));
  group.reduce_scatter(output, contiguous_values(input), options);
  if (!records) return output;
  attach(output, input, std::string(kName), {group},
         [group, op, factor = options.op.factor()](const at::Tensor& gradient,
                                                   const at::Tensor&) -> at::Tensor {
           const at::Tensor gathered = all_gather(gradient, group);
           if (op == ReduceOp::kAvg) return gathered / group.world_size();
           return factor ? gathered * *factor : gathered;
         });
  return output;
}

at::Tensor all_to_all(const at::Tensor& tensor, const ProcessGroup& group,
                      const AllToAllOptions& options) {
  constexpr std::string_view kName = "all_to_all";
  const at::Tensor input = checked_input(group, kName, tensor);
  int64_t num_rows = input.dim() == 0 ? 0 : input.size(0);
  // Negative splits count as 0 here; the group's all_to_all throws for them.
  if (!options.output_split_sizes.empty()) num_rows = 0;
  for (const int64_t split : options.output_split_sizes) num_rows += std::max<int64_t>(split, 0);
  at::Tensor output = empty_rows(input, num_rows);
  group.all_to_all(output, contiguous_values(input), options);
  if (!records_gradients(input)) return output;
  AllToAllOptions reverse;
  if (!options.input_split_sizes.empty() || !options.output_split_sizes.empty()) {
    reverse = {.output_split_sizes = splits_of(input, group, options.input_split_sizes),
               .input_split_sizes = splits_of(output, group, options.output_split_sizes)};
  }
  attach(output, input, std::string(kName), {group},
         [group, reverse](const at::Tensor& gradient, const at::Tensor&) {
           return all_to_all(gradient, group, reverse);
         });
  return output;
}

at::Tensor broadcast(const at::Tensor& tensor, const ProcessGroup& group,
                     const BroadcastOptions& options) {
  constexpr std::string_view kName = "broadcast";
  const at::Tensor input = checked_input(group, kName, tensor);
  at::Tensor output = group.rank() == options.root ? copy_of_values(input)
                                                   : at::empty(input.sizes(), input.options());
  group.broadcast(output, options);
  if (!records_gradients(input)) return output;
  attach(output, input, std::string(kName), {group},
         [group, root = options.root](const at::Tensor& gradient, const at::Tensor&) {
           return reduce_to_root(gradient, group, root);
         });
  return output;
}

at::Tensor copy_to_group(const at::Tensor& tensor, const ProcessGroup& group) {
  constexpr std::string_view kName = "copy_to_group";
  const at::Tensor input = checked_input(group, kName, tensor);
  if (!is_differentiated(input)) return input;
  at::Tensor output;
  {
    const at::NoGradGuard no_grad;
    output = input.view_as(input);
  }
  // If the input or this view of it were changed in place, autograd would silently drop the view's
  // backward. With IN_CUSTOM_FUNCTION autograd throws at the change instead.
  if (auto* view = torch::autograd::impl::get_view_autograd_meta(output)) {
    view->set_creation_meta(torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  }
  attach(output, input, std::string(kName), kOneLoss,
         [group](const at::Tensor& gradient, const at::Tensor&) {
           return reduce_from_group(gradient, group);
         });
  return output;
}

at::Tensor reduce_from_group(const at::Tensor& tensor, const ProcessGroup& group,
                             const ReduceFromGroupOptions& options) {
  constexpr std::string_view kName = "reduce_from_group";
  const at::Tensor input = checked_input(group, kName, tensor);
  at::Tensor output = copy_of_values(input);
  group.all_reduce(output, {.timeout = options.timeout});
  if (!is_differentiated(input)) return output;
  attach(output, input, std::string(kName), kOneLoss,
         [group](const at::Tensor& gradient, const at::Tensor&) {
           return copy_to_group(gradient, group);
         });
  return output;
}

at::Tensor scatter_to_group(const at::Tensor& tensor, const ProcessGroup& group,
                            const DimensionOptions& options) {
  constexpr std::string_view kName = "scatter_to_group";
  const at::Tensor input = checked_input(group, kName, tensor);
  const int64_t size = part_size(group, kName, input, options.dim);
  at::Tensor output = copy_of_values(input.detach().narrow(options.dim, group.rank() * size, size));
  if (!is_differentiated(input)) return output;
  attach(output, input, std::string(kName), kOneLoss,
         [group, dim = options.dim](const at::Tensor& gradient, const at::Tensor&) {
           return gather_from_group(gradient, group, {.dim = dim});
         });
  return output;
}

at::Tensor gather_from_group(const at::Tensor& tensor, const ProcessGroup& group,
                             const DimensionOptions& options) {
  constexpr std::string_view kName = "gather_from_group";
  const at::Tensor input = checked_input(group, kName, tensor);
  check_dimension(group, kName, input, options.dim);
  const int64_t dim = options.dim < 0 ? options.dim + input.dim() : options.dim;
  const at::Tensor first = input.detach().movedim(dim, 0).contiguous();
  at::Tensor output = empty_rows(first, first.size(0) * group.world_size());
  group.all_gather(output, first, {.timeout = options.timeout});
  // The output is copied, because autograd would drop the node of a view that is changed in place
  // (see copy_to_group).
  if (dim != 0) output = copy_of_values(output.movedim(0, dim));
  if (!is_differentiated(input)) return output;
  attach(output, input, std::string(kName), kOneLoss,
         [group, dim](const at::Tensor& gradient, const at::Tensor&) {
           return scatter_to_group(gradient, group, {.dim = dim});
         });
  return output;
}

}  // namespace cadre::functional
