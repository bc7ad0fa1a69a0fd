#include "cadre/parallel/layers/parallel_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/activation_parts.h"
#include "cadre/parallel/layers/recorded_backward.h"
#include "cadre/tensor/autograd/autograd_node.h"
#include "cadre/tensor/group/backward/differentiable.h"

namespace cadre {
namespace {

using torch::autograd::variable_list;

std::optional<at::Tensor> optional_of(const at::Tensor& bias) {
  return bias.defined() ? std::optional(bias) : std::nullopt;
}

// Casts to the dtype in which at::linear would compute under autocast, so that forward and backward
// use the same dtype.
at::Tensor as_autocast(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const c10::DeviceType type = tensor.device().type();
  const bool casts =
      at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
  if (!casts) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(type), tensor, type);
}

// Reshapes the tensor to (rows, features).
at::Tensor as_matrix(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  return tensor.reshape(
      {c10::multiply_integers(tensor.sizes().begin(), tensor.sizes().end() - 1), tensor.size(-1)});
}

// Reshapes the matrix (rows, features) to the sizes of `tensor`, which has the same number of
// elements.
at::Tensor with_sizes_of(const at::Tensor& tensor, const at::Tensor& matrix) {
  return tensor.dim() == 2 ? matrix : matrix.view(tensor.sizes());
}

// Returns the sizes of `tensor` with `features` as the last size.
std::vector<int64_t> with_features(const at::Tensor& tensor, int64_t features) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = features;
  return sizes;
}

enum Operand : size_t { kInput, kWeight, kBias, kNumOperands };

// The autograd node of both functions. A torch::autograd::Function would take more time, because it
// stores values by name, collects the metadata of all outputs in each backward and searches for
// outputs that are inputs.
class ParallelLinearNode : public torch::autograd::Node {
 public:
  ParallelLinearNode(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                     const ProcessGroup& group, const ParallelLinearOptions& options)
      : Node(torch::autograd::collect_next_edges(input, weight, bias)),
        group_(group),
        options_(options),
        saved_{torch::autograd::SavedVariable(input, /*is_output=*/false),
               torch::autograd::SavedVariable(weight, /*is_output=*/false),
               torch::autograd::SavedVariable(bias, /*is_output=*/false)} {}

  variable_list apply(variable_list&& gradients) final {
    // An undefined gradient counts as zeros. The collectives run in this case, too, because the
    // other ranks wait for this rank.
    const at::Tensor gradient =
        gradients[0].defined() ? std::move(gradients[0]) : input_metadata(0).zeros_like();
    gradients.clear();
    return in_backward_of(function(), [&]() -> variable_list {
      const variable_list saved = unpacked();
      if (!at::GradMode::is_enabled()) {
        // Autograd records nothing in the rest of this function.
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return gradients_of(saved, gradient);
      }
      return recorded_backward(saved, gradient,
                               [&](const variable_list& inputs) { return composed(inputs); });
    });
  }

  std::string name() const final { return std::string(function()); }

  void release_variables() final {
    const std::lock_guard lock(mutex_);
    for (auto& variable : saved_) variable.reset_data();
  }

 protected:
  bool is_wanted(Operand operand) const { return task_should_compute_output(operand); }
  const ProcessGroup& group() const { return group_; }
  bool is_sequence_parallel() const { return options_.sequence_parallel; }

  // Computes the gradients of weight and bias. `rows` is the gradient of the output as a matrix.
  void add_parameters(const at::Tensor& rows, const at::Tensor& input, const at::Tensor& bias,
                      variable_list& results) const {
    if (is_wanted(kWeight)) results[kWeight] = rows.t().mm(as_matrix(input));
    if (bias.defined() && is_wanted(kBias)) results[kBias] = rows.sum(0);
  }

 private:
  virtual std::string_view function() const = 0;
  // Computes the same function as the forward with differentiable operations, for create_graph.
  virtual at::Tensor composed(const variable_list& operands) const = 0;
  virtual variable_list gradients_of(const variable_list& saved,
                                     const at::Tensor& gradient) const = 0;

  // Returns the saved tensors. After release_variables() it throws libtorch's error about a second
  // backward through the graph.
  variable_list unpacked() {
    const std::lock_guard lock(mutex_);
    variable_list tensors(kNumOperands);
    for (size_t i = 0; i < kNumOperands; ++i) tensors[i] = saved_[i].unpack();
    return tensors;
  }

  ProcessGroup group_;
  ParallelLinearOptions options_;
  std::array<torch::autograd::SavedVariable, kNumOperands> saved_;
};

class ColumnNode final : public ParallelLinearNode {
 public:
  using ParallelLinearNode::ParallelLinearNode;
  static constexpr std::string_view kName = "column_parallel_linear";

 private:
  std::string_view function() const override { return kName; }

  at::Tensor composed(const variable_list& operands) const override {
    const at::Tensor whole = is_sequence_parallel()
                                 ? gather_sequence(operands[kInput], group())
                                 : functional::copy_to_group(operands[kInput], group());
    return at::linear(whole, operands[kWeight], optional_of(operands[kBias]));
  }

  variable_list gradients_of(const variable_list& saved,
                             const at::Tensor& gradient) const override {
    const at::Tensor rows = as_matrix(gradient);
    return is_sequence_parallel() ? of_sequence(saved, gradient, rows) : of_whole(saved, rows);
  }

  variable_list of_whole(const variable_list& saved, const at::Tensor& rows) const {
    variable_list results(kNumOperands);
    std::optional<Work> reduction;
    if (is_wanted(kInput)) {
      const at::Tensor sum = rows.mm(saved[kWeight]);
      reduction = group().all_reduce_async(sum);
      results[kInput] = with_sizes_of(saved[kInput], sum);
    }
    add_parameters(rows, saved[kInput], saved[kBias], results);
    if (reduction) reduction->wait();
    return results;
  }

  variable_list of_sequence(const variable_list& saved, const at::Tensor& gradient,
                            const at::Tensor& rows) const {
    const at::Tensor& shard = saved[kInput];
    variable_list results(kNumOperands);
    std::optional<Work> gather;
    at::Tensor parts;
    if (is_wanted(kWeight)) {
      std::vector<int64_t> sizes = shard.sizes().vec();
      sizes.insert(sizes.begin(), group().world_size());
      parts = at::empty(sizes, shard.options());
      gather = group().all_gather_async(parts, shard.contiguous());
    }
    std::optional<Work> reduction;
    if (is_wanted(kInput)) {
      const at::Tensor whole =
          rows.mm(saved[kWeight]).view(with_features(gradient, saved[kWeight].size(1)));
      results[kInput] = at::empty(shard.sizes(), shard.options());
      reduction = group().reduce_scatter_async(results[kInput], parts_first(whole, group()));
    }
    if (gather) gather->wait();
    add_parameters(rows, gather ? parts_in_place(parts) : at::Tensor(), saved[kBias], results);
    if (reduction) reduction->wait();
    return results;
  }
};

class RowNode final : public ParallelLinearNode {
 public:
  using ParallelLinearNode::ParallelLinearNode;
  static constexpr std::string_view kName = "row_parallel_linear";

 private:
  std::string_view function() const override { return kName; }

  at::Tensor composed(const variable_list& operands) const override {
    const at::Tensor part = at::linear(operands[kInput], operands[kWeight]);
    const at::Tensor& bias = operands[kBias];
    if (!is_sequence_parallel()) {
      const at::Tensor sum = functional::reduce_from_group(part, group());
      return bias.defined() ? sum + bias : sum;
    }
    const at::Tensor sum = reduce_scatter_sequence(part, group());
    return bias.defined() ? sum + functional::copy_to_group(bias, group()) : sum;
  }

  variable_list gradients_of(const variable_list& saved,
                             const at::Tensor& gradient) const override {
    const at::Tensor rows =
        as_matrix(is_sequence_parallel() ? gather_sequence(gradient, group()) : gradient);
    variable_list results(kNumOperands);
    if (is_wanted(kInput)) {
      results[kInput] = with_sizes_of(saved[kInput], rows.mm(saved[kWeight]));
    }
    add_parameters(rows, saved[kInput], saved[kBias], results);
    return results;
  }
};

at::Tensor column_output(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                         const ProcessGroup& group, const ParallelLinearOptions& options) {
  return at::linear(options.sequence_parallel ? gather_sequence(input, group) : input, weight,
                    optional_of(bias));
}

at::Tensor row_output(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      const ProcessGroup& group, const ParallelLinearOptions& options) {
  at::Tensor output = at::linear(input, weight);
  if (options.sequence_parallel) {
    output = reduce_scatter_sequence(output, group);
  } else {
    group.all_reduce(output);
  }
  return bias.defined() ? output.add_(bias) : output;
}

// Throws for an operand with a tangent of forward-mode differentiation, which would otherwise be
// ignored silently.
void refuse_tangent(const at::Tensor& operand, std::string_view role, std::string_view function) {
  if (!operand.defined() || !operand._fw_grad(/*level=*/0).defined()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the {} carries a tangent of forward-mode differentiation, which this "
                     "function does not support; use backward()",
                     function, role));
}

// Returns the output of `compute`. If autograd records, connects it to a node in the graph.
template <typename NodeOfFunction, typename Compute>
at::Tensor recorded(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                    const ProcessGroup& group, const ParallelLinearOptions& options,
                    const Compute& compute) {
  NodePointer node;
  at::Tensor output;
  refuse_tangent(input, "input", NodeOfFunction::kName);
  refuse_tangent(weight, "weight", NodeOfFunction::kName);
  refuse_tangent(bias, "bias", NodeOfFunction::kName);
  if (torch::autograd::compute_requires_grad(input, weight, bias)) {
    node = make_node<NodeOfFunction>(input, weight, bias, group, options);
  }
  {
    const at::NoGradGuard no_grad;
    // Autograd does not see how the output is computed, so the output is not a view of another
    // tensor and the program may change it in place.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = compute(input, weight, bias, group, options);
  }
  if (node) torch::autograd::create_gradient_edge(output, std::move(node));
  return output;
}

}  // namespace

at::Tensor column_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                                  const at::Tensor& bias, const ProcessGroup& group,
                                  const ParallelLinearOptions& options) {
  return recorded<ColumnNode>(as_autocast(input), as_autocast(weight), as_autocast(bias), group,
                              options, column_output);
}

at::Tensor row_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                               const at::Tensor& bias, const ProcessGroup& group,
                               const ParallelLinearOptions& options) {
  return recorded<RowNode>(as_autocast(input), as_autocast(weight), as_autocast(bias), group,
                           options, row_output);
}

}  // namespace cadre
