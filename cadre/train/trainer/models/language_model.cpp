#include "cadre/train/trainer/models/language_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>

#include "cadre/train/trainer/models/gpt.h"
#include "cadre/train/trainer/models/window_mlp.h"

namespace cadre::train {

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
