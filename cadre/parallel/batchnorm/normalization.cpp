#include "cadre/parallel/batchnorm/normalization.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <exception>
#include <optional>
#include <tuple>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/backward/backward_collectives.h"
#include "cadre/tensor/group/backward/backward_weight.h"

namespace cadre::batchnorm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kBackward = "backward";

// What the backward needs beside tensors.
struct Saved final : torch::CustomClassHolder {
  Saved(std::shared_ptr<const SynchronousLayer> of, double values, const AffineOptions& affine)
      : layer(std::move(of)), count(values), eps(affine.eps) {
    if (affine.weight) weight_dtype = affine.weight->scalar_type();
    if (affine.bias) bias_dtype = affine.bias->scalar_type();
  }
  std::shared_ptr<const SynchronousLayer> layer;
  double count;
  double eps;
  std::optional<at::ScalarType> weight_dtype;  // nullopt: there is no weight
  std::optional<at::ScalarType> bias_dtype;
};

// The first elements of a rank's message, whose sums over the ranks are compared with what they
// must be; the sums of the gradients follow.
enum SumPlace : int64_t {
  kSumOfLayers,
  kSumOfSquares,
  kNumWeighted,
  kNumFailed,
  kSumOfFailed,
  kSumHeader
};

// Gradients of this rank's batch that the ranks add.
struct ChannelSums {
  at::Tensor gradient;   // (C), the sum of the output's gradients
  at::Tensor deviation;  // (C), that of their products with (input - mean)
};

at::Tensor header_of(const SynchronousLayer& layer, bool is_weighted, bool has_failed) {
  const auto number = static_cast<double>(layer.number);
  return at::tensor({number, number * number, is_weighted ? 1.0 : 0.0, has_failed ? 1.0 : 0.0,
                     has_failed ? static_cast<double>(layer.group.rank()) : 0.0},
                    at::kDouble);
}

// Throws on all ranks if a rank has failed, or if the ranks do not run the same thing.
void check_sums(const SynchronousLayer& layer, const at::Tensor& header) {
  const double* const sums = header.const_data_ptr<double>();
  const auto num_ranks = static_cast<double>(layer.group.world_size());
  const auto number = static_cast<double>(layer.number);
  if (sums[kNumFailed] == 1) {
    refuse_failed_peer(layer, kBackward, static_cast<int>(sums[kSumOfFailed]));
  }
  if (sums[kNumFailed] > 1) {
    throw Error(ErrorCode::kAborted, format("{} ranks have thrown in the backward of this layer",
                                            static_cast<int>(sums[kNumFailed])));
  }
  if (sums[kSumOfLayers] != num_ranks * number ||
      sums[kSumOfSquares] != num_ranks * number * number) {
    throw Error(ErrorCode::kInvalidArgument,
                "the ranks are in the backward of different layers. Use the outputs of the same "
                "layers on all ranks");
  }
  if (sums[kNumWeighted] != 0 && sums[kNumWeighted] != num_ranks) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{} of {} ranks run this backward for a wrapper that weights the ranks by "
                       "their samples, and the others under no_sync() or without a wrapper. Run "
                       "the same kind of backward on all ranks",
                       static_cast<int>(sums[kNumWeighted]), layer.group.world_size()));
  }
}

// Adds the sums of all ranks, each multiplied by the weight of its rank, and divides the result by
// this rank's weight, because the wrapper multiplies this rank's gradients by it later. Exchanges
// also if `failure` is set, because the other ranks wait for this rank.
ChannelSums exchange_sums(const SynchronousLayer& layer, const ChannelSums& own,
                          const at::TensorOptions& options, const std::exception_ptr& failure) {
  const std::optional<double> weight = backward_weight();
  // A wrapper that learns the weights only later must check that they are equal.
  if (!weight) note_backward_collective(layer.group);
  const int64_t channels = layer.num_features;
  const at::Tensor message = at::zeros({kSumHeader + 2 * channels}, options.dtype(at::kDouble));
  message.narrow(0, 0, kSumHeader).copy_(header_of(layer, weight.has_value(), failure != nullptr));
  if (!failure && weight != 0.0) {
    message.narrow(0, kSumHeader, channels).copy_(own.gradient);
    message.narrow(0, kSumHeader + channels, channels).copy_(own.deviation);
    if (weight) message.narrow(0, kSumHeader, 2 * channels).mul_(*weight);
  }
  layer.group.all_reduce(message);
  if (failure) std::rethrow_exception(failure);
  check_sums(layer, message.narrow(0, 0, kSumHeader).to(at::kCPU));
  const at::Tensor sums = message.narrow(0, kSumHeader, 2 * channels);
  // The gradients of a rank without samples are multiplied by 0 later.
  if (weight) sums.mul_(*weight == 0 ? 0.0 : 1.0 / *weight);
  return {.gradient = sums.narrow(0, 0, channels), .deviation = sums.narrow(0, channels, channels)};
}

// The batch and the gradients of its outputs, both in the dtype of the statistics.
struct Batch {
  at::Tensor gradient;
  at::Tensor deviation;  // input - mean; changed in place by input_gradient()
  ChannelSums sums;
};

Batch own_batch(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& gradient) {
  Batch batch{.gradient = gradient.to(mean.scalar_type()),
              .deviation = input - for_channels(mean, input),
              .sums = {}};
  const std::vector<int64_t> dims = dims_of_values(input);
  batch.sums = {.gradient = batch.gradient.sum(dims),
                .deviation = (batch.gradient * batch.deviation).sum(dims)};
  return batch;
}

// Returns weight / std * (gradient - mean(gradients) - deviation * mean(gradients * deviations) /
// variance), where the means are over the values of all ranks.
at::Tensor input_gradient(const Batch& batch, const ChannelSums& sums,
                          const at::Tensor& inverse_std, const at::Tensor& weight, double count) {
  const at::ScalarType dtype = inverse_std.scalar_type();
  const at::Tensor scale = weight.defined() ? inverse_std * weight.to(dtype) : inverse_std;
  const at::Tensor of_deviation = (sums.deviation / -count).to(dtype) * inverse_std.square();
  const at::Tensor of_mean = (sums.gradient / -count).to(dtype);
  const auto spread = [&](const at::Tensor& values) {
    return for_channels(values, batch.gradient);
  };
  return batch.deviation.mul_(spread(of_deviation))
      .add_(spread(of_mean))
      .add_(batch.gradient)
      .mul_(spread(scale));
}

// Returns the result for a batch without rows. It reads the parameters, because under
// FullyShardedDataParallel all ranks must use the same units.
at::Tensor of_nothing(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias) {
  at::Tensor result = at::empty_like(input);
  if (weight) result = result * for_channels(*weight, input);
  if (bias) result = result + for_channels(*bias, input);
  return result.to(input.scalar_type());
}

struct Normalization : torch::autograd::Function<Normalization> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean,
                            const at::Tensor& variance, const c10::intrusive_ptr<Saved>& saved) {
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, variance});
    context->saved_data["saved"] = c10::IValue::make_capsule(saved);
    if (input.numel() == 0) return of_nothing(input, weight, bias);
    // The kernel takes parameters of the input's dtype or of that of the statistics.
    const auto as_statistics = [&](const auto& parameter) -> std::optional<at::Tensor> {
      if (!parameter) return std::nullopt;
      return parameter->to(mean.scalar_type());
    };
    return std::get<0>(at::native_batch_norm(input, as_statistics(weight), as_statistics(bias),
                                             mean, variance, /*training=*/false, /*momentum=*/0.0,
                                             saved->eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved =
        c10::static_intrusive_pointer_cast<Saved>(context->saved_data["saved"].toCapsule());
    try {
      return backward_of(*context, *saved, gradients[0]);
    } catch (const Error& error) {
      throw error.with_context(saved->layer->place(kBackward));
    }
  }

 private:
  // The places of gradients in the result, which has one for each argument of forward().
  enum Argument : size_t { kInput, kWeight, kBias, kNumArguments = 6 };

  static variable_list backward_of(AutogradContext& context, const Saved& saved,
                                   const at::Tensor& gradient) {
    const bool creates_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_grad;
    const variable_list tensors = context.get_saved_variables();
    const at::Tensor& input = tensors[0];
    const at::Tensor& mean = tensors[2];
    Batch batch;
    at::Tensor inverse_std;
    std::exception_ptr failure;
    try {
      if (creates_graph) refuse_create_graph();
      if (input.numel() > 0 && backward_weight() == 0.0) refuse_weight_of_zero();
      batch = own_batch(input, mean, gradient);
      inverse_std = (tensors[3] + saved.eps).rsqrt();
    } catch (...) {
      failure = std::current_exception();
      if (!context.needs_input_grad(kInput)) throw;
    }
    variable_list result(kNumArguments);
    if (context.needs_input_grad(kInput)) {
      const ChannelSums sums = exchange_sums(*saved.layer, batch.sums, mean.options(), failure);
      result[0] =
          input_gradient(batch, sums, inverse_std, tensors[1], saved.count).to(input.scalar_type());
    }
    // Autograd counts only the arguments that are given.
    const bool has_weight = saved.weight_dtype.has_value();
    if (has_weight && context.needs_input_grad(kWeight)) {
      result[kWeight] = (batch.sums.deviation * inverse_std).to(*saved.weight_dtype);
    }
    if (saved.bias_dtype && context.needs_input_grad(has_weight ? kBias : kWeight)) {
      result[kBias] = batch.sums.gradient.to(*saved.bias_dtype);
    }
    return result;
  }

  // The rows of this rank are in the statistics of all ranks, so the gradients through them count.
  [[noreturn]] static void refuse_weight_of_zero() {
    throw Error(ErrorCode::kInvalidArgument,
                "this rank has rows in a synchronous batch normalization, and set_num_samples(0) "
                "says that it has no samples, so the gradients through its rows would be lost. "
                "Give the rank no rows, or count them");
  }

  [[noreturn]] static void refuse_create_graph() {
    throw Error(ErrorCode::kInvalidArgument,
                "a synchronous batch normalization has no second derivative (create_graph). Use "
                "eval() for this pass, or a normalization without statistics of the batch, such as "
                "GroupNorm");
  }
};

}  // namespace

at::Tensor normalize(const std::shared_ptr<const SynchronousLayer>& layer, const at::Tensor& input,
                     const BatchStatistics& statistics, const AffineOptions& affine) {
  return Normalization::apply(input, affine.weight, affine.bias, statistics.mean,
                              statistics.variance,
                              c10::make_intrusive<Saved>(layer, statistics.count, affine));
}

}  // namespace cadre::batchnorm
