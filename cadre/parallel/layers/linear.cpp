#include "cadre/parallel/layers/linear.h"

#include <ATen/ops/linear.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/activation_parts.h"
#include "cadre/parallel/layers/parallel_linear.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/tensor/mesh/layout.h"

namespace cadre {

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  const LayerParallelism* const how = parallelism();
  if (how == nullptr) return torch::nn::LinearImpl::forward(input);
  if (how->style == ParallelStyle::kColwise) return column_parallel(input, *how);
  if (how->style == ParallelStyle::kRowwise) return row_parallel(input, *how);
  check_features(input, options.in_features());
  if (how->style == ParallelStyle::kReplicated) return torch::nn::LinearImpl::forward(input);
  // Each rank's backward computes the gradients for its shard of the sequence; the backward of
  // copy_to_group() sums them over the ranks.
  const at::Tensor whole_weight = functional::copy_to_group(weight, how->group);
  if (!bias.defined()) return at::linear(input, whole_weight);
  return at::linear(input, whole_weight, functional::copy_to_group(bias, how->group));
}

at::Tensor LinearImpl::column_parallel(const at::Tensor& input, const LayerParallelism& how) const {
  check_features(input, options.in_features());
  const at::Tensor output = column_parallel_linear(input, weight, bias, how.group,
                                                   {.sequence_parallel = how.sequence_parallel});
  return how.gather_output ? gather_features(output, how.group, options.out_features()) : output;
}

at::Tensor LinearImpl::row_parallel(const at::Tensor& input, const LayerParallelism& how) const {
  check_features(input, how.input_is_parallel ? weight.size(1) : options.in_features());
  return row_parallel_linear(how.input_is_parallel ? input : scatter_features(input, how.group),
                             weight, bias, how.group, {.sequence_parallel = how.sequence_parallel});
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(
    const std::optional<torch::Device>& device) const {
  refuse_copy_if_parallelized();
  const auto copy = std::make_shared<LinearImpl>(options);
  copy->set_block_size(block_size_);
  return layers::with_parameters_of(*this, copy, device);
}

void LinearImpl::set_block_size(int64_t size) {
  if (size < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("Linear: set_block_size({}), expected at least 1", size));
  }
  block_size_ = size;
}

std::string LinearImpl::options_text() const {
  return format("blocks of {} features", block_size_);
}

int64_t LinearImpl::first_divided_feature() const {
  const LayerParallelism* const how = parallelism();
  const bool is_rowwise = has_style(ParallelStyle::kRowwise);
  if (!is_rowwise && !has_style(ParallelStyle::kColwise)) return 0;
  return chunk_of(is_rowwise ? options.in_features() : options.out_features(),
                  how->group.world_size(), how->group.rank())
      .begin;
}

std::vector<NamedTensor> LinearImpl::parameters_of_layer() const {
  std::vector<NamedTensor> parameters = {{"weight", weight}};
  if (bias.defined()) parameters.push_back({"bias", bias});
  return parameters;
}

std::optional<int64_t> LinearImpl::divided_dim(std::string_view parameter,
                                               ParallelStyle style) const {
  if (style == ParallelStyle::kColwise) return 0;
  if (style == ParallelStyle::kRowwise && parameter == "weight") return 1;
  return std::nullopt;
}

std::optional<std::string> LinearImpl::problem_of(const LayerParallelism& how) const {
  const bool is_colwise = how.style == ParallelStyle::kColwise;
  if (!is_colwise && how.style != ParallelStyle::kRowwise) return std::nullopt;
  const int64_t features = is_colwise ? options.out_features() : options.in_features();
  const int64_t num_blocks = features / block_size_;
  if (features % block_size_ != 0) {
    return format("its {} features are no multiple of the size of a block, {}", features,
                  block_size_);
  }
  if (block_size_ == 1 || num_blocks % how.group.world_size() == 0) return std::nullopt;
  return format(
      "its {} features are {} blocks (attention heads) of {}, which cannot be divided evenly among "
      "{} ranks; use a group whose number of ranks divides the number of blocks",
      features, num_blocks, block_size_, how.group.world_size());
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const torch::nn::LinearOptions& given,
                                                   const ProcessGroup& group,
                                                   const ColumnParallelOptions& parallel)
    : LinearImpl(given) {
  layers::parallelize_new(*this,
                          {.group = group,
                           .style = ParallelStyle::kColwise,
                           .sequence_parallel = parallel.sequence_parallel,
                           .gather_output = parallel.gather_output},
                          "ColumnParallelLinear");
}

RowParallelLinearImpl::RowParallelLinearImpl(const torch::nn::LinearOptions& given,
                                             const ProcessGroup& group,
                                             const RowParallelOptions& parallel)
    : LinearImpl(given) {
  layers::parallelize_new(*this,
                          {.group = group,
                           .style = ParallelStyle::kRowwise,
                           .sequence_parallel = parallel.sequence_parallel,
                           .input_is_parallel = parallel.input_is_parallel},
                          "RowParallelLinear");
}

}  // namespace cadre
