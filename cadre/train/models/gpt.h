// A GPT: token and position embeddings, pre-norm blocks of causal attention and MLP, a final norm,
// and a head tied to the token embedding.
//
// Threads, blocking, errors: as torch::nn::Module. Parameters are named after GPT-2's (wte.weight,
// h_0.attn_c_attn.weight, ...), with nn::Linear's (out, in) shapes. Source: Radford et al.,
// "Language Models are Unsupervised Multitask Learners", 2019, also for the initial values: normal
// with a standard deviation of 0.02, divided by sqrt(2 * layers) for projections into the residual
// stream.
#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <vector>

#include "cadre/train/models/language_model.h"

namespace cadre::train {

// x + attention(norm(x)), then x + mlp(norm(x)). (B, T, width) to (B, T, width).
class GptBlock : public torch::nn::Module {
 public:
  explicit GptBlock(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor compute(const at::Tensor& x);
  at::Tensor attend(const at::Tensor& x);

  int64_t heads_;
  bool is_recomputed_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_key_value_;
  torch::nn::Linear attention_projection_;
  torch::nn::LayerNorm mlp_norm_;
  torch::nn::Linear mlp_expand_;
  torch::nn::Linear mlp_projection_;
};

class Gpt : public LanguageModel {
 public:
  Gpt(const ModelConfig& config, int64_t vocabulary, const at::Generator& generator);

  at::Tensor forward(const at::Tensor& tokens) override;
  int64_t context() const override { return context_; }

 private:
  void initialize(int64_t layers, const at::Generator& generator);

  int64_t context_;
  torch::nn::Embedding token_embedding_;
  torch::nn::Embedding position_embedding_;
  std::vector<std::shared_ptr<ShardUnit<GptBlock>>> blocks_;
  torch::nn::LayerNorm final_norm_;
};

}  // namespace cadre::train
