#include "cadre/train/trainer/models/image_classifier.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

#include "cadre/core/base/format.h"

namespace cadre::train {
namespace {

namespace nn = torch::nn;

constexpr int64_t kNumPixels = 28 * 28;
constexpr int64_t kNumFeatures = 9216;  // 64 channels of 12 x 12 pixels
constexpr int64_t kNumHidden = 128;
constexpr double kDropoutOfConvolutions = 0.25;
constexpr double kDropoutOfHidden = 0.5;

// Initializes as PyTorch does: weights and biases are uniform within 1 / sqrt(fan_in). The random
// numbers of a module's weight are drawn before those of its bias.
void initialize(nn::Module& model, at::Generator generator) {
  const torch::NoGradGuard no_grad;
  double bound = 0;
  for (const auto& item : model.named_parameters()) {
    at::Tensor parameter = item.value();
    if (parameter.dim() >= 2) {
      bound = 1 / std::sqrt(static_cast<double>(parameter[0].numel()));
    }
    parameter.uniform_(-bound, bound, generator);
  }
}

}  // namespace

MnistCnn::MnistCnn(const ModelConfig& config)
    : has_dropout_(config.dropout),
      is_recomputed_(recomputes_activations(config)),
      conv1_(register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 32, 3)))),
      conv2_(register_module("conv2", nn::Conv2d(nn::Conv2dOptions(32, 64, 3)))),
      fc1_(register_module("fc1", LinearUnit(kNumFeatures, kNumHidden))),
      fc2_(register_module("fc2", nn::Linear(kNumHidden, kNumClasses))) {}

at::Tensor MnistCnn::forward(const at::Tensor& images) {
  at::Tensor x = run_layer([this](const at::Tensor& given) { return features(given); }, images,
                           is_recomputed_);
  x = torch::dropout(torch::relu(fc1_(x)), kDropoutOfHidden, drops());
  return torch::log_softmax(fc2_(x), /*dim=*/1);
}

at::Tensor MnistCnn::features(const at::Tensor& images) {
  const at::Tensor x = torch::max_pool2d(torch::relu(conv2_(torch::relu(conv1_(images)))), 2);
  return torch::dropout(x, kDropoutOfConvolutions, drops()).flatten(1);
}

ImageMlp::ImageMlp(const ModelConfig& config) : head_(config.width, kNumClasses) {
  for (int64_t i = 0; i < config.layers; ++i) {
    hidden_.push_back(register_module(
        cadre::format("hidden_{}", i),
        HiddenUnit(HiddenLayerOptions{.num_inputs = i == 0 ? kNumPixels : config.width,
                                      .num_outputs = config.width,
                                      .activation = Activation::kRelu,
                                      .is_recomputed = recomputes_activations(config)})));
  }
  register_module("head", head_);
}

at::Tensor ImageMlp::forward(const at::Tensor& images) {
  at::Tensor x = images.flatten(1);
  for (HiddenUnit& layer : hidden_) x = layer(x);
  return torch::log_softmax(head_(x), /*dim=*/1);
}

std::shared_ptr<Model> make_image_classifier(const ModelConfig& config, uint64_t seed) {
  std::shared_ptr<Model> model;
  if (config.kind == "cnn") {
    model = std::make_shared<MnistCnn>(config);
  } else {
    model = std::make_shared<ImageMlp>(config);
  }
  initialize(*model, at::make_generator<at::CPUGeneratorImpl>(seed));
  return model;
}

at::Tensor classification_loss(const at::Tensor& log_probabilities, const at::Tensor& targets) {
  // The mean over an empty batch is NaN; the sum is 0 and keeps the graph for backward.
  if (targets.numel() == 0) return log_probabilities.sum();
  return torch::nll_loss(log_probabilities, targets);
}

}  // namespace cadre::train
