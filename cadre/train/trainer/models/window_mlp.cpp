#include "cadre/train/trainer/models/window_mlp.h"

#include <torch/torch.h>

#include <cmath>

#include "cadre/core/base/format.h"

namespace cadre::train {

namespace nn = torch::nn;

WindowMlp::WindowMlp(const ModelConfig& config, int64_t vocabulary, const at::Generator& generator)
    : context_(config.context),
      window_(config.window),
      embedding_(register_module("embedding", nn::Embedding(vocabulary, config.width))),
      head_(config.width, vocabulary) {
  for (int64_t i = 0; i < config.layers; ++i) {
    const int64_t num_inputs = i == 0 ? window_ * config.width : config.width;
    hidden_.push_back(register_module(
        cadre::format("hidden_{}", i),
        HiddenUnit(HiddenLayerOptions{.num_inputs = num_inputs,
                                      .num_outputs = config.width,
                                      .activation = Activation::kGelu,
                                      .is_recomputed = recomputes_activations(config)})));
  }
  register_module("head", head_);

  const torch::NoGradGuard no_grad;
  for (const auto& item : named_parameters()) {
    at::Tensor parameter = item.value();
    if (parameter.dim() < 2) {
      parameter.zero_();
    } else {
      // This keeps the variance of activations through GELU about constant (He et al., 2015).
      parameter.normal_(0.0, std::sqrt(2.0 / static_cast<double>(parameter.size(1))), generator);
    }
  }
}

at::Tensor WindowMlp::forward(const at::Tensor& tokens) {
  // Pads (B, T, width) with window - 1 zeros in front; the result is (B, T, window * width).
  const at::Tensor padded = torch::constant_pad_nd(embedding_(tokens), {0, 0, window_ - 1, 0});
  at::Tensor x = padded.unfold(/*dimension=*/1, window_, /*step=*/1).flatten(2);
  for (HiddenUnit& layer : hidden_) x = layer(x);
  return head_(x);
}

}  // namespace cadre::train
