// What the trainer trains: a model that predicts the next token at every place of a text.
//
// Threads: as torch::nn::Module. Blocking: never. Errors: c10::Error for wrong shapes.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>

#include "cadre/train/config/config.h"

namespace cadre::train {

class LanguageModel : public torch::nn::Module {
 public:
  // tokens: (B, T) int64, T at most context(); result: logits (B, T, vocabulary).
  virtual at::Tensor forward(const at::Tensor& tokens) = 0;
  virtual int64_t context() const = 0;
};

// The model that the configuration names. Its first values depend on `seed` alone, not on
// libtorch's default generator, which the ranks of one process share.
std::shared_ptr<LanguageModel> make_language_model(const ModelConfig& config, int64_t vocabulary,
                                                   uint64_t seed);

// Mean cross entropy over all tokens of logits (B, T, V) against targets (B, T), in nats. Of an
// empty batch: 0, with a gradient of zeros.
at::Tensor next_token_loss(const at::Tensor& logits, const at::Tensor& targets);

int64_t num_parameters(const torch::nn::Module& model);

}  // namespace cadre::train
