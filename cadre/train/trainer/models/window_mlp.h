// A multilayer perceptron over the last tokens: a small and fast model without attention.
//
// Threads, blocking, errors: as torch::nn::Module.
// Source: Bengio et al., "A Neural Probabilistic Language Model", 2003.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <vector>

#include "cadre/train/trainer/models/language_model.h"

namespace cadre::train {

// Concatenates the embeddings of the last `config.window` tokens (zeros before the text), and maps
// them through `config.layers` hidden layers of `config.width` with GELU.
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

}  // namespace cadre::train
