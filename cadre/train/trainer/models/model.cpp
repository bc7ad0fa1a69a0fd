#include "cadre/train/trainer/models/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>

namespace cadre::train {

int64_t num_parameters(const torch::nn::Module& model) {
  int64_t total = 0;
  for (const at::Tensor& parameter : model.parameters()) total += parameter.numel();
  return total;
}

at::Tensor with_auxiliary_loss(const at::Tensor& loss, Model& model) {
  const at::Tensor auxiliary = model.take_auxiliary_loss();
  return auxiliary.defined() ? loss + auxiliary : loss;
}

bool recomputes_activations(const ModelConfig& config) {
  return config.checkpoint_activations == "blocks";
}

HiddenLayer::HiddenLayer(const HiddenLayerOptions& layer)
    : LinearImpl(layer.num_inputs, layer.num_outputs),
      activation_(layer.activation),
      is_recomputed_(layer.is_recomputed) {}

at::Tensor HiddenLayer::forward(const at::Tensor& input) {
  const auto compute = [this](const at::Tensor& given) {
    const at::Tensor output = LinearImpl::forward(given);
    return activation_ == Activation::kRelu ? at::relu(output) : at::gelu(output);
  };
  return run_layer(compute, input, is_recomputed_);
}

}  // namespace cadre::train
