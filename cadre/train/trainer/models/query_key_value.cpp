#include "cadre/train/trainer/models/query_key_value.h"

#include <ATen/ops/linear.h>

#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/parallel_linear.h"

namespace cadre::train {

QueryKeyValueImpl::QueryKeyValueImpl(int64_t width, int64_t heads)
    : torch::nn::LinearImpl(width, 3 * width), heads_(heads) {}

at::Tensor QueryKeyValueImpl::forward(const at::Tensor& input) {
  const at::Tensor output = features(input);
  const int64_t head_width = options.in_features() / heads_;
  return output
      .view({output.size(0), output.size(1), 3, output.size(2) / (3 * head_width), head_width})
      .permute({2, 0, 3, 1, 4});
}

at::Tensor QueryKeyValueImpl::features(const at::Tensor& input) const {
  const bool is_separate = weight.dim() == 3;
  const at::Tensor matrix = is_separate ? weight.flatten(0, 1) : weight;
  const at::Tensor vector = is_separate ? bias.flatten() : bias;
  const LayerParallelism* const how = parallelism();
  if (how == nullptr || how->style == ParallelStyle::kReplicated) {
    return at::linear(input, matrix, vector);
  }
  check_features(input, options.in_features());
  return column_parallel_linear(input, matrix, vector, how->group,
                                {.sequence_parallel = how->sequence_parallel});
}

void QueryKeyValueImpl::separate() {
  const int64_t width = options.in_features();
  weight.set_data(weight.detach().view({3, width, width}));
  bias.set_data(bias.detach().view({3, width}));
}

std::shared_ptr<torch::nn::Module> QueryKeyValueImpl::clone(
    const std::optional<torch::Device>& device) const {
  refuse_copy_if_parallelized();
  return layers::with_parameters_of(
      *this, std::make_shared<QueryKeyValueImpl>(options.in_features(), heads_), device);
}

std::vector<NamedTensor> QueryKeyValueImpl::parameters_of_layer() const {
  return {{"weight", weight}, {"bias", bias}};
}

std::optional<int64_t> QueryKeyValueImpl::divided_dim(std::string_view, ParallelStyle style) const {
  return style == ParallelStyle::kColwise ? std::optional<int64_t>(1) : std::nullopt;
}

std::optional<std::string> QueryKeyValueImpl::problem_of(const LayerParallelism& how) const {
  if (how.style == ParallelStyle::kReplicated) return std::nullopt;
  if (how.style != ParallelStyle::kColwise || weight.dim() != 3) {
    return "the layer before attention is divided by heads: separate() it, and divide it kColwise";
  }
  if (heads_ % how.group.world_size() == 0) return std::nullopt;
  return cadre::format("its {} heads of attention are not divided by {} ranks", heads_,
                       how.group.world_size());
}

}  // namespace cadre::train
