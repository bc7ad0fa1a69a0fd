#include "cadre/parallel/batchnorm/batch_statistics.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <string>
#include <tuple>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::batchnorm {
namespace {

constexpr const char* kForward = "forward";

// The first elements of a rank's message; the means and the squared deviations follow.
enum Place : int64_t { kCount, kLayer, kNeedsGradient, kHasFailed, kHeader };

int64_t message_numel(const SynchronousLayer& layer) {
  return kHeader + 2 * layer.num_features;
}

void check_input(const SynchronousLayer& layer, const at::Tensor& input) {
  if (input.dim() >= 2 && input.size(1) == layer.num_features &&
      at::isFloatingType(input.scalar_type())) {
    return;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      format("the input has shape {} and dtype {}; expected (N, {}, ...) of a "
             "floating-point dtype",
             list_of(input.sizes()), c10::toString(input.scalar_type()), layer.num_features));
}

void write_message(const at::Tensor& message, const SynchronousLayer& layer,
                   const at::Tensor& input, const InputUse& use) {
  check_input(layer, input);
  const int64_t channels = layer.num_features;
  const int64_t count = input.numel() / channels;
  message.narrow(0, 0, kHeader)
      .copy_(at::tensor({static_cast<double>(count), static_cast<double>(layer.number),
                         use.needs_gradient ? 1.0 : 0.0, 0.0},
                        at::kDouble));
  if (count == 0) return;  // the message has zeros, and var_mean() would give NaN
  const auto [variance, mean] =
      at::var_mean(input.to(statistics_dtype(input.scalar_type())), dims_of_values(input),
                   /*correction=*/std::optional<at::Scalar>(0), /*keepdim=*/false);
  message.narrow(0, kHeader, channels).copy_(mean);
  message.narrow(0, kHeader + channels, channels).copy_(variance).mul_(count);
}

// Throws if a rank has failed, or if the ranks do not run the same thing. All ranks have the same
// headers (ranks, kHeader), so all of them throw.
void check_headers(const SynchronousLayer& layer, const at::Tensor& headers) {
  const auto of = headers.accessor<double, 2>();
  for (int64_t rank = 0; rank < headers.size(0); ++rank) {
    if (of[rank][kHasFailed] != 0) {
      refuse_failed_peer(layer, kForward, static_cast<int>(rank));
    }
  }
  for (int64_t rank = 1; rank < headers.size(0); ++rank) {
    if (of[rank][kLayer] != of[0][kLayer]) {
      const auto name = [&](int64_t at) -> const std::string& {
        return layer.layer_names->at(static_cast<size_t>(of[at][kLayer]));
      };
      throw Error(ErrorCode::kInvalidArgument,
                  format("the ranks are in different layers: rank 0 in \"{}\", rank {} in \"{}\". "
                         "Run the same layers in the same order on all ranks",
                         name(0), rank, name(rank)));
    }
    if (of[rank][kNeedsGradient] != of[0][kNeedsGradient]) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("the input needs a gradient on rank {} and none on rank {}, so the backward would "
                 "wait for the other rank. Use the same grad mode, and inputs with the same "
                 "requires_grad, on all ranks",
                 of[0][kNeedsGradient] != 0 ? 0 : rank, of[0][kNeedsGradient] != 0 ? rank : 0));
    }
  }
}

BatchStatistics combined(const SynchronousLayer& layer, const at::Tensor& messages,
                         const at::Tensor& headers, at::ScalarType dtype) {
  const double total = headers.select(1, kCount).sum().item<double>();
  if (total < 2) {
    throw Error(ErrorCode::kInvalidArgument,
                format("the batches of all ranks have {} values for each channel together, and "
                       "statistics in training mode need at least 2",
                       static_cast<int64_t>(total)));
  }
  const int64_t channels = layer.num_features;
  const at::Tensor counts = messages.narrow(1, kCount, 1);
  const at::Tensor means = messages.narrow(1, kHeader, channels);
  const at::Tensor deviations = messages.narrow(1, kHeader + channels, channels);
  const at::Tensor mean = (means * counts).sum(0) / total;
  const at::Tensor between = ((means - mean).square() * counts).sum(0);
  const at::Tensor variance = (deviations.sum(0) + between) / total;
  return {.mean = mean.to(dtype), .variance = variance.to(dtype), .count = total};
}

}  // namespace

at::ScalarType statistics_dtype(at::ScalarType input) {
  return input == at::kDouble ? at::kDouble : at::kFloat;
}

std::vector<int64_t> dims_of_values(const at::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

at::Tensor for_channels(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

void refuse_failed_peer(const SynchronousLayer& layer, std::string_view pass, int culprit) {
  throw Error(ErrorCode::kAborted,
              format("rank {} has thrown in the {} of this layer; its error is the first failure. "
                     "No rank has changed its running statistics in this call",
                     culprit, pass))
      .with_culprit(Rank{culprit})
      .with_reporter(Rank{layer.group.rank()});
}

BatchStatistics exchange_statistics(const SynchronousLayer& layer, const at::Tensor& input,
                                    const InputUse& use) {
  const at::NoGradGuard no_grad;
  try {
    const at::TensorOptions options = at::TensorOptions(at::kDouble).device(input.device());
    const int64_t numel = message_numel(layer);
    const at::Tensor message = at::zeros({numel}, options);
    std::exception_ptr failure;
    try {
      write_message(message, layer, input, use);
    } catch (...) {
      // The other ranks wait for this rank's message, which says that it has failed.
      failure = std::current_exception();
      message.zero_();
      message.narrow(0, kHasFailed, 1).fill_(1);
    }
    const at::Tensor messages = at::empty({layer.group.world_size(), numel}, options);
    layer.group.all_gather(messages, message);
    if (failure) std::rethrow_exception(failure);
    const at::Tensor headers = messages.narrow(1, 0, kHeader).to(at::kCPU);
    check_headers(layer, headers);
    return combined(layer, messages, headers, statistics_dtype(input.scalar_type()));
  } catch (const Error& error) {
    throw error.with_context(layer.place(kForward));
  }
}

}  // namespace cadre::batchnorm
