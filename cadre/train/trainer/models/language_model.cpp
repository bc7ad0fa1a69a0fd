#include "cadre/train/trainer/models/language_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/train/trainer/models/gpt.h"

namespace cadre::train {
namespace {

namespace nn = torch::nn;

// A multilayer perceptron over the last tokens: a small and fast model without attention.
// Concatenates the embeddings of the last `config.window` tokens (zeros before the text), and maps
// them through `config.layers` hidden layers of `config.width` with GELU.
// Source: Bengio et al., "A Neural Probabilistic Language Model", 2003.
class WindowMlp : public LanguageModel {
 public:
  WindowMlp(const ModelConfig& config, int64_t vocabulary, const at::Generator& generator);

  at::Tensor forward(const at::Tensor& tokens) override;
  int64_t context() const override { return context_; }

 private:
  int64_t context_;
  int64_t window_;
  torch::nn::Embedding embedding_;
  std::vector<HiddenUnit> hidden_;
  torch::nn::Linear head_;
};

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
      // This deviation keeps the variance of activations about constant through GELU (He et al.,
      // 2015).
      parameter.normal_(0.0, std::sqrt(2.0 / static_cast<double>(parameter.size(1))), generator);
    }
  }
}

at::Tensor WindowMlp::forward(const at::Tensor& tokens) {
  // Pads (B, T, width) with window - 1 zeros at the front of dimension T; the result of unfolding
  // is (B, T, window * width).
  const at::Tensor padded = torch::constant_pad_nd(embedding_(tokens), {0, 0, window_ - 1, 0});
  at::Tensor x = padded.unfold(/*dimension=*/1, window_, /*step=*/1).flatten(2);
  for (HiddenUnit& layer : hidden_) x = layer(x);
  return head_(x);
}

}  // namespace

std::shared_ptr<LanguageModel> make_language_model(const ModelConfig& config, int64_t vocabulary,
                                                   uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  if (config.kind == "mlp") return std::make_shared<WindowMlp>(config, vocabulary, generator);
  return std::make_shared<Gpt>(config, vocabulary, generator);
}

at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets) {
  // The mean over an empty batch is NaN; the sum is 0 and keeps the graph for backward.
  if (targets.numel() == 0) return logits.sum();
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

}  // namespace cadre::train
