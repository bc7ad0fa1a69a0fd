#include "cadre/layers/parallel_linear.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "cadre/group/differentiable.h"
#include "cadre/layers/activation_parts.h"
#include "cadre/layers/recorded_backward.h"

namespace cadre {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Place final : torch::CustomClassHolder {
  Place(ProcessGroup given, ParallelLinearOptions given_options)
      : group(std::move(given)), options(given_options) {}
  ProcessGroup group;
  ParallelLinearOptions options;
};
using PlacePointer = c10::intrusive_ptr<Place>;

void keep(AutogradContext* context, const variable_list& tensors, const PlacePointer& place) {
  context->save_for_backward(tensors);
  context->saved_data["place"] = c10::IValue::make_capsule(place);
}

PlacePointer place_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Place>(context->saved_data["place"].toCapsule());
}

std::optional<at::Tensor> optional_of(const at::Tensor& bias) {
  return bias.defined() ? std::optional(bias) : std::nullopt;
}

// Under autocast the dtype that at::linear would compute in: forward and backward have one dtype.
at::Tensor as_autocast(const at::Tensor& tensor) {
  if (!tensor.defined() || !at::autocast::is_autocast_enabled(at::kCPU)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), tensor, at::kCPU);
}

// (rows, features)
at::Tensor as_matrix(const at::Tensor& tensor) {
  return tensor.reshape(
      {c10::multiply_integers(tensor.sizes().begin(), tensor.sizes().end() - 1), tensor.size(-1)});
}

// The sizes of `tensor` with another last one.
std::vector<int64_t> with_features(const at::Tensor& tensor, int64_t features) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes.back() = features;
  return sizes;
}

// The same function by differentiable operations.
at::Tensor composed_column(const variable_list& inputs, const Place& place) {
  const at::Tensor whole = place.options.sequence_parallel
                               ? gather_sequence(inputs[0], place.group)
                               : functional::copy_to_group(inputs[0], place.group);
  return at::linear(whole, inputs[1], optional_of(inputs[2]));
}

at::Tensor composed_row(const variable_list& inputs, const Place& place) {
  const at::Tensor part = at::linear(inputs[0], inputs[1]);
  if (!place.options.sequence_parallel) {
    const at::Tensor sum = functional::reduce_from_group(part, place.group);
    return inputs[2].defined() ? sum + inputs[2] : sum;
  }
  const at::Tensor sum = reduce_scatter_sequence(part, place.group);
  return inputs[2].defined() ? sum + functional::copy_to_group(inputs[2], place.group) : sum;
}

struct ColumnLinear : torch::autograd::Function<ColumnLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const PlacePointer& place) {
    keep(context, {input, weight, bias.value_or(at::Tensor())}, place);
    return at::linear(
        place->options.sequence_parallel ? gather_sequence(input, place->group) : input, weight,
        bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return in_backward_of("column_parallel_linear", [&]() -> variable_list {
      const PlacePointer place = place_of(context);
      const variable_list saved = context->get_saved_variables();
      variable_list results;
      if (at::GradMode::is_enabled()) {
        results = recorded_backward(saved, gradients[0], [&](const variable_list& inputs) {
          return composed_column(inputs, *place);
        });
      } else {
        results = place->options.sequence_parallel
                      ? of_sequence(context, saved, gradients[0], place->group)
                      : of_whole(context, saved, gradients[0], place->group);
      }
      results.emplace_back();
      return results;
    });
  }

 private:
  static variable_list of_whole(AutogradContext* context, const variable_list& saved,
                                const at::Tensor& gradient, const ProcessGroup& group) {
    const at::Tensor rows = as_matrix(gradient);
    variable_list results(3);
    std::optional<Work> reduction;
    if (context->needs_input_grad(0)) {
      const at::Tensor sum = rows.mm(saved[1]);
      reduction = group.all_reduce_async(sum);
      results[0] = sum.view(saved[0].sizes());
    }
    add_parameters(context, saved, {.rows = rows, .input = saved[0]}, results);
    if (reduction) reduction->wait();
    return results;
  }

  static variable_list of_sequence(AutogradContext* context, const variable_list& saved,
                                   const at::Tensor& gradient, const ProcessGroup& group) {
    const at::Tensor rows = as_matrix(gradient);
    const at::Tensor& shard = saved[0];
    variable_list results(3);
    std::optional<Work> gather;
    at::Tensor parts;
    if (context->needs_input_grad(1)) {
      std::vector<int64_t> sizes = shard.sizes().vec();
      sizes.insert(sizes.begin(), group.world_size());
      parts = at::empty(sizes, shard.options());
      gather = group.all_gather_into_tensor_async(parts, shard.contiguous());
    }
    std::optional<Work> reduction;
    if (context->needs_input_grad(0)) {
      const at::Tensor whole = rows.mm(saved[1]).view(with_features(gradient, saved[1].size(1)));
      results[0] = at::empty(shard.sizes(), shard.options());
      reduction = group.reduce_scatter_tensor_async(results[0], parts_first(whole, group));
    }
    if (gather) gather->wait();
    add_parameters(context, saved,
                   {.rows = rows, .input = gather ? parts_in_place(parts) : at::Tensor()}, results);
    if (reduction) reduction->wait();
    return results;
  }

  struct Operands {
    const at::Tensor& rows;  // of the gradient of the output
    const at::Tensor input;
  };

  // The gradients of weight and bias, which the collective overlaps.
  static void add_parameters(AutogradContext* context, const variable_list& saved,
                             const Operands& operands, variable_list& results) {
    if (context->needs_input_grad(1)) {
      results[1] = operands.rows.t().mm(as_matrix(operands.input));
    }
    if (saved[2].defined() && context->needs_input_grad(2)) results[2] = operands.rows.sum(0);
  }
};

struct RowLinear : torch::autograd::Function<RowLinear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const PlacePointer& place) {
    keep(context, {input, weight, bias.value_or(at::Tensor())}, place);
    at::Tensor output = at::linear(input, weight);
    if (place->options.sequence_parallel) {
      output = reduce_scatter_sequence(output, place->group);
    } else {
      place->group.all_reduce(output);
    }
    return bias ? output.add_(*bias) : output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return in_backward_of("row_parallel_linear", [&]() -> variable_list {
      const PlacePointer place = place_of(context);
      const variable_list saved = context->get_saved_variables();
      if (at::GradMode::is_enabled()) {
        variable_list results = recorded_backward(
            saved, gradients[0],
            [&](const variable_list& inputs) { return composed_row(inputs, *place); });
        results.emplace_back();
        return results;
      }
      const at::Tensor rows =
          as_matrix(place->options.sequence_parallel ? gather_sequence(gradients[0], place->group)
                                                     : gradients[0]);
      variable_list results(4);
      if (context->needs_input_grad(0)) results[0] = rows.mm(saved[1]).view(saved[0].sizes());
      if (context->needs_input_grad(1)) results[1] = rows.t().mm(as_matrix(saved[0]));
      if (saved[2].defined() && context->needs_input_grad(2)) results[2] = rows.sum(0);
      return results;
    });
  }
};

}  // namespace

at::Tensor column_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                                  const at::Tensor& bias, const ProcessGroup& group,
                                  const ParallelLinearOptions& options) {
  return ColumnLinear::apply(as_autocast(input), as_autocast(weight),
                             optional_of(as_autocast(bias)),
                             c10::make_intrusive<Place>(group, options));
}

at::Tensor row_parallel_linear(const at::Tensor& input, const at::Tensor& weight,
                               const at::Tensor& bias, const ProcessGroup& group,
                               const ParallelLinearOptions& options) {
  return RowLinear::apply(as_autocast(input), as_autocast(weight), optional_of(as_autocast(bias)),
                          c10::make_intrusive<Place>(group, options));
}

}  // namespace cadre
