#include "cadre/parallel/layers/layer_norm.h"

#include <ATen/ops/layer_norm.h>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/backward/differentiable.h"

namespace cadre {

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  const LayerParallelism* const how = parallelism();
  if (how != nullptr) check_features(input, options.normalized_shape().back());
  if (!has_style(ParallelStyle::kSequence)) return torch::nn::LayerNormImpl::forward(input);
  const auto shared = [&](const at::Tensor& parameter) -> std::optional<at::Tensor> {
    if (!parameter.defined()) return std::nullopt;
    return functional::copy_to_group(parameter, how->group);
  };
  return at::layer_norm(input, options.normalized_shape(), shared(weight), shared(bias),
                        options.eps());
}

std::shared_ptr<torch::nn::Module> LayerNormImpl::clone(
    const std::optional<torch::Device>& device) const {
  refuse_copy_if_parallelized();
  return layers::with_parameters_of(*this, std::make_shared<LayerNormImpl>(options), device);
}

std::vector<NamedTensor> LayerNormImpl::parameters_of_layer() const {
  std::vector<NamedTensor> parameters;
  if (weight.defined()) parameters.push_back({"weight", weight});
  if (bias.defined()) parameters.push_back({"bias", bias});
  return parameters;
}

std::string LayerNormImpl::options_text() const {
  return format("normalized_shape {}, eps {}", list_of(options.normalized_shape()), options.eps());
}

std::optional<std::string> LayerNormImpl::problem_of(const LayerParallelism& how) const {
  if (how.style == ParallelStyle::kSequence && options.normalized_shape().size() != 1) {
    return format(
        "its normalized_shape {} covers more dimensions than the features of a token, and other "
        "ranks have a part of these dimensions",
        list_of(options.normalized_shape()));
  }
  if (how.style == ParallelStyle::kSequence || how.style == ParallelStyle::kReplicated) {
    return std::nullopt;
  }
  return "a norm needs all features of a token: it is kSequence or kReplicated";
}

}  // namespace cadre
