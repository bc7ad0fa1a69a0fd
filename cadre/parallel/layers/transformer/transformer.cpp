#include "cadre/parallel/layers/transformer/transformer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/gelu.h>

#include <cmath>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"

namespace cadre {
namespace {

constexpr double kTransformerStd = 0.02;

// Checks all options except the numbers of heads, which SelfAttention checks.
TransformerOptions checked_transformer(TransformerOptions options) {
  if (options.mlp_dim == 0) options.mlp_dim = 4 * options.embed_dim;
  if (options.vocabulary < 1 || options.context < 1 || options.embed_dim < 1 ||
      options.num_blocks < 1 || options.mlp_dim < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                format("TransformerOptions: vocabulary {}, context {}, embed_dim {}, num_blocks {} "
                       "and mlp_dim {} must be at least 1",
                       options.vocabulary, options.context, options.embed_dim, options.num_blocks,
                       options.mlp_dim));
  }
  return options;
}

const TransformerOptions& options_of_embedding(const TransformerEmbedding& embedding) {
  if (embedding.is_empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "TransformerHead: the embedding is empty; pass the one of the model, or the "
                "options for a head with a weight of its own");
  }
  return embedding->options;
}

LayerNorm norm_of(const TransformerOptions& options) {
  return LayerNorm(torch::nn::LayerNormOptions({options.embed_dim}));
}

void draw_normal(at::Tensor weight, double std) {
  const at::NoGradGuard no_grad;
  weight.normal_(0.0, std);
}

void initialize_linear(Linear& layer, double std) {
  draw_normal(layer->weight, std);
  if (!layer->bias.defined()) return;
  const at::NoGradGuard no_grad;
  layer->bias.zero_();
}

}  // namespace

TransformerEmbeddingImpl::TransformerEmbeddingImpl(const TransformerOptions& given)
    : options(checked_transformer(given)) {
  tokens = register_module("tokens", Embedding(options.vocabulary, options.embed_dim));
  positions = register_module("positions", Embedding(options.context, options.embed_dim));
  draw_normal(tokens->weight, kTransformerStd);
  draw_normal(positions->weight, kTransformerStd);
}

at::Tensor TransformerEmbeddingImpl::forward(const at::Tensor& indices) {
  if (indices.dim() != 2 || indices.size(1) < 1 || indices.size(1) > options.context) {
    throw Error(ErrorCode::kInvalidArgument,
                format("TransformerEmbedding: the tokens have the sizes {}, expected (B, T) with T "
                       "from 1 to {}, the context of the model",
                       list_of(indices.sizes()), options.context));
  }
  const ContextParallel* const sequence = context();
  if (sequence != nullptr) {
    return tokens(sequence->shard(indices, 1)) + positions(sequence->positions(indices.device()));
  }
  return tokens(indices) +
         positions(at::arange(indices.size(1), indices.options().dtype(at::kLong)));
}

std::vector<PlanEntry> TransformerEmbeddingImpl::plan(
    const TensorParallelPlanOptions& division) const {
  std::vector<PlanEntry> entries = {{.pattern = "tokens",
                                     .style = ParallelStyle::kRowwise,
                                     .gather_output = division.whole_logits}};
  if (division.sequence_parallel) {
    entries.push_back({.pattern = "positions", .style = ParallelStyle::kSequence});
  }
  return entries;
}

TransformerBlockImpl::TransformerBlockImpl(const TransformerOptions& given)
    : options(checked_transformer(given)) {
  norm_1 = register_module("norm_1", norm_of(options));
  attention = register_module(
      "attention",
      SelfAttention(SelfAttentionOptions{.embed_dim = options.embed_dim,
                                         .num_heads = options.num_heads,
                                         .num_key_value_heads = options.num_key_value_heads}));
  norm_2 = register_module("norm_2", norm_of(options));
  up = register_module("up", Linear(options.embed_dim, options.mlp_dim));
  down = register_module("down", Linear(options.mlp_dim, options.embed_dim));
  const double residual_std =
      kTransformerStd / std::sqrt(2.0 * static_cast<double>(options.num_blocks));
  initialize_linear(attention->qkv, kTransformerStd);
  initialize_linear(attention->output, residual_std);
  initialize_linear(up, kTransformerStd);
  initialize_linear(down, residual_std);
}

at::Tensor TransformerBlockImpl::forward(const at::Tensor& x) {
  if (!options.recompute || !checkpointing_is_useful()) return compute(x);
  return checkpoint(
      [this](const std::vector<at::Tensor>& inputs) {
        return std::vector<at::Tensor>{compute(inputs[0])};
      },
      {x})[0];
}

at::Tensor TransformerBlockImpl::compute(const at::Tensor& x) {
  const at::Tensor h = x + attention(norm_1(x));
  return h + down(at::gelu(up(norm_2(h))));
}

std::vector<PlanEntry> TransformerBlockImpl::plan(const TensorParallelPlanOptions& division) const {
  std::vector<PlanEntry> entries = {{.pattern = "up", .style = ParallelStyle::kColwise},
                                    {.pattern = "down", .style = ParallelStyle::kRowwise}};
  if (division.sequence_parallel) {
    entries.push_back({.pattern = "norm_1", .style = ParallelStyle::kSequence});
    entries.push_back({.pattern = "norm_2", .style = ParallelStyle::kSequence});
  }
  return entries;
}

TransformerHeadImpl::TransformerHeadImpl(const TransformerOptions& given)
    : options(checked_transformer(given)) {
  norm = register_module("norm", norm_of(options));
  output = register_module(
      "output",
      Linear(torch::nn::LinearOptions(options.embed_dim, options.vocabulary).bias(false)));
  initialize_linear(output, kTransformerStd);
}

TransformerHeadImpl::TransformerHeadImpl(const TransformerEmbedding& embedding)
    : options(options_of_embedding(embedding)), tokens_(embedding->tokens) {
  norm = register_module("norm", norm_of(options));
}

at::Tensor TransformerHeadImpl::forward(const at::Tensor& x) {
  const at::Tensor hidden = norm(x);
  return output ? output(hidden) : tokens_->logits(hidden);
}

std::vector<PlanEntry> TransformerHeadImpl::plan(const TensorParallelPlanOptions& division) const {
  std::vector<PlanEntry> entries;
  if (output) {
    entries.push_back({.pattern = "output",
                       .style = ParallelStyle::kColwise,
                       .gather_output = division.whole_logits});
  }
  if (division.sequence_parallel) {
    entries.push_back({.pattern = "norm", .style = ParallelStyle::kSequence});
  }
  return entries;
}

std::shared_ptr<torch::nn::Module> TransformerHeadImpl::shared_module() const {
  return tokens_ ? tokens_.ptr() : nullptr;
}

}  // namespace cadre
