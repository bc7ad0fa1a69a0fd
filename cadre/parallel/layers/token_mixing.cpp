#include "cadre/parallel/layers/token_mixing.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

namespace cadre::layers {
namespace {

template <typename... Types>
bool is_any_of(const torch::nn::Module& module) {
  return ((dynamic_cast<const Types*>(&module) != nullptr) || ...);
}

template <typename Convolution>
bool is_wider_than_a_token(const torch::nn::Module& module) {
  const auto* const convolution = dynamic_cast<const Convolution*>(&module);
  return convolution != nullptr && (*convolution->options.kernel_size())[0] > 1;
}

}  // namespace

std::optional<std::string> token_mixing_of(const torch::nn::Module& module) {
  if (is_any_of<torch::nn::MultiheadAttentionImpl, torch::nn::TransformerImpl,
                torch::nn::TransformerEncoderImpl, torch::nn::TransformerDecoderImpl,
                torch::nn::TransformerEncoderLayerImpl, torch::nn::TransformerDecoderLayerImpl>(
          module)) {
    return "attends to the tokens of its input";
  }
  if (is_any_of<torch::nn::RNNImpl, torch::nn::LSTMImpl, torch::nn::GRUImpl>(module)) {
    return "has a state that goes from token to token";
  }
  if (is_wider_than_a_token<torch::nn::Conv1dImpl>(module) ||
      is_wider_than_a_token<torch::nn::ConvTranspose1dImpl>(module)) {
    return "combines neighbouring tokens";
  }
  if (is_any_of<torch::nn::BatchNorm1dImpl, torch::nn::InstanceNorm1dImpl>(module)) {
    return "computes statistics over the tokens of its input";
  }
  return std::nullopt;
}

}  // namespace cadre::layers
