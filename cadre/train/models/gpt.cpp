#include "cadre/train/models/gpt.h"

#include <torch/torch.h>

#include <cmath>

#include "cadre/base/format.h"

namespace cadre::train {
namespace {

namespace nn = torch::nn;

constexpr int64_t kMlpExpansion = 4;
constexpr double kInitialStd = 0.02;

nn::LayerNorm make_norm(int64_t width) {
  return nn::LayerNorm(nn::LayerNormOptions({width}));
}

}  // namespace

GptBlock::GptBlock(const ModelConfig& config)
    : heads_(config.heads),
      is_recomputed_(recomputes_activations(config)),
      attention_norm_(register_module("ln_1", make_norm(config.width))),
      query_key_value_(register_module("attn_c_attn", nn::Linear(config.width, 3 * config.width))),
      attention_projection_(register_module("attn_c_proj", nn::Linear(config.width, config.width))),
      mlp_norm_(register_module("ln_2", make_norm(config.width))),
      mlp_expand_(
          register_module("mlp_c_fc", nn::Linear(config.width, kMlpExpansion * config.width))),
      mlp_projection_(
          register_module("mlp_c_proj", nn::Linear(kMlpExpansion * config.width, config.width))) {}

at::Tensor GptBlock::forward(const at::Tensor& x) {
  return run_layer([this](const at::Tensor& given) { return compute(given); }, x, is_recomputed_);
}

at::Tensor GptBlock::compute(const at::Tensor& x) {
  const at::Tensor attended = x + attend(attention_norm_(x));
  return attended +
         mlp_projection_(torch::gelu(mlp_expand_(mlp_norm_(attended)), /*approximate=*/"tanh"));
}

at::Tensor GptBlock::attend(const at::Tensor& x) {
  const int64_t batch = x.size(0);
  const int64_t length = x.size(1);
  const int64_t width = x.size(2);
  // (B, T, 3 * width) to three of (B, heads, T, width / heads).
  const at::Tensor parts =
      query_key_value_(x).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4});
  const at::Tensor mixed =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                       /*dropout_p=*/0.0, /*is_causal=*/true);
  return attention_projection_(mixed.transpose(1, 2).reshape({batch, length, width}));
}

Gpt::Gpt(const ModelConfig& config, int64_t vocabulary, const at::Generator& generator)
    : context_(config.context),
      token_embedding_(register_module("wte", nn::Embedding(vocabulary, config.width))),
      position_embedding_(register_module("wpe", nn::Embedding(config.context, config.width))),
      final_norm_(make_norm(config.width)) {
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks_.push_back(
        register_module(cadre::format("h_{}", i), std::make_shared<ShardUnit<GptBlock>>(config)));
  }
  register_module("ln_f", final_norm_);
  initialize(config.layers, generator);
}

at::Tensor Gpt::forward(const at::Tensor& tokens) {
  const at::Tensor positions = torch::arange(tokens.size(1), torch::kLong);
  at::Tensor x = token_embedding_(tokens) + position_embedding_(positions);
  for (const auto& block : blocks_) x = block->forward(x);
  return torch::linear(final_norm_(x), token_embedding_->weight);  // the tied head
}

void Gpt::initialize(int64_t layers, const at::Generator& generator) {
  const torch::NoGradGuard no_grad;
  const double residual_std = kInitialStd / std::sqrt(2.0 * static_cast<double>(layers));
  for (const auto& item : named_parameters()) {
    at::Tensor parameter = item.value();
    if (parameter.dim() >= 2) {
      const bool is_residual = item.key().ends_with("c_proj.weight");
      parameter.normal_(0.0, is_residual ? residual_std : kInitialStd, generator);
    } else if (item.key().ends_with("bias")) {
      parameter.zero_();  // a norm's weight keeps its ones
    }
  }
}

}  // namespace cadre::train
