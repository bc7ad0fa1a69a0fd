#include "cadre/train/trainer/tasks/text_sample.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "cadre/train/data/text_corpus.h"

namespace cadre::train {
namespace {

// logits: (V).
int64_t draw(const at::Tensor& logits, const SampleConfig& config, at::Generator& generator) {
  if (config.temperature == 0) return logits.argmax().item<int64_t>();
  const int64_t num_candidates =
      config.top_k == 0 ? logits.numel() : std::min(config.top_k, logits.numel());
  const auto [values, tokens] = logits.topk(num_candidates);
  // Computes differences to the largest logit, so that no quotient is positive and infinite.
  const at::Tensor scaled = (values - values[0]) / config.temperature;
  const at::Tensor choice =
      torch::multinomial(torch::softmax(scaled, 0), 1, /*replacement=*/false, generator);
  return tokens[choice.item<int64_t>()].item<int64_t>();
}

}  // namespace

std::string sample_text(const Inference& infer, int64_t context, const SampleConfig& config,
                        uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<int64_t> tokens = {kEndOfText};  // a document follows this token
  for (const char byte : config.prompt) tokens.push_back(static_cast<unsigned char>(byte));
  std::string text = config.prompt;
  for (int64_t i = 0; i < config.tokens; ++i) {
    const auto length = std::min(static_cast<int64_t>(tokens.size()), context);
    const at::Tensor window = torch::tensor(
        at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(length)), torch::kLong);
    const at::Tensor logits = infer(window.unsqueeze(0))[0][length - 1];
    const int64_t token = draw(logits, config, generator);
    if (token == kEndOfText) break;
    tokens.push_back(token);
    text += static_cast<char>(token);
  }
  return text;
}

}  // namespace cadre::train
