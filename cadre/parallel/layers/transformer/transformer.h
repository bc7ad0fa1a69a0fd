// The layers of a transformer as GPT-2 has it: embeddings of tokens and positions, pre-norm blocks
// of attention and MLP, and a head with a norm of its own. They go into a torch::nn::Sequential or
// into modules of the program.
//
// Ranks can divide each of them: their matrices, by parallelize_module() with
// tensor_parallel_plan(), their sequences, by set_context_parallel(), their parameters, where
// ShardUnit<TransformerBlockImpl> is a unit, and a Sequential of them, by pipeline_of().
//
// Initial values are GPT-2's: normal with a standard deviation of 0.02, which is divided by
// sqrt(2 * num_blocks) for the projections into the residual stream; biases are 0.
//
// Threads, lifetime: tensor_parallel_layer.h. Blocking: never, unless they are divided; then as
// their layers. Errors: cadre::Error, kInvalidArgument for options or inputs that do not fit.
// Dropout: there is none; a model with dropout has blocks of its own, of CounterBasedDropout.
// Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/attention/self_attention.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/layer_norm.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

// The sizes of a model; all of its layers are given the same. Numbers are at least 1.
struct TransformerOptions {
  int64_t vocabulary;
  int64_t context;  // the largest number of tokens in a sequence
  int64_t embed_dim;
  int64_t num_heads;   // divides embed_dim
  int64_t num_blocks;  // the number of blocks in the whole model
  // The number of heads of keys and values, which divides num_heads; 0 means num_heads.
  int64_t num_key_value_heads = 0;
  // The features of the MLP between its two layers; 0 means 4 * embed_dim.
  int64_t mlp_dim = 0;
  // A block keeps only its input, and computes its activations again in the backward
  // (tensor/hooks/activations/activation_checkpoint.h).
  bool recompute = false;
};

class CADRE_EXPORT TransformerEmbeddingImpl : public torch::nn::Module,
                                              public ContextParallelLayer,
                                              public PlannedModule {
 public:
  explicit TransformerEmbeddingImpl(const TransformerOptions& options);

  // indices: (B, T), int64 or int32, 1 <= T <= context, of whole sequences, also with context and
  // sequence parallelism. Result: (B, T, embed_dim), where T counts the tokens of this rank.
  at::Tensor forward(const at::Tensor& indices);
  // Divides `tokens` by rows.
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;

  TransformerOptions options;
  Embedding tokens{nullptr}, positions{nullptr};
};
TORCH_MODULE(TransformerEmbedding);

// Computes h = x + attention(norm_1(x)), then h + down(gelu(up(norm_2(h)))).
class CADRE_EXPORT TransformerBlockImpl : public torch::nn::Module, public PlannedModule {
 public:
  explicit TransformerBlockImpl(const TransformerOptions& options);

  // x, result: (B, T, embed_dim), where T counts the tokens of this rank.
  at::Tensor forward(const at::Tensor& x);
  // Divides `up` by output features and `down` by input features; the attention has its own plan.
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;

  TransformerOptions options;
  LayerNorm norm_1{nullptr}, norm_2{nullptr};
  SelfAttention attention{nullptr};
  Linear up{nullptr}, down{nullptr};

 private:
  at::Tensor compute(const at::Tensor& x);
};
TORCH_MODULE(TransformerBlock);

// Computes logits: a norm, then a product with the transposed table of a TransformerEmbedding (a
// tied head), or with a weight of its own, "output". A tied head does not register the table, so
// that parameters() of a model has it once, as one of the embedding.
class CADRE_EXPORT TransformerHeadImpl : public torch::nn::Module,
                                         public PlannedModule,
                                         public SharingModule {
 public:
  explicit TransformerHeadImpl(const TransformerOptions& options);
  // Makes the head of a model with this embedding, to which it is tied.
  explicit TransformerHeadImpl(const TransformerEmbedding& embedding);

  // x: (B, T, embed_dim), where T counts the tokens of this rank. Result: (B, T, vocabulary); with
  // tensor parallelism this rank's part of the vocabulary, for the whole sequence, which
  // vocab_parallel_cross_entropy() takes.
  at::Tensor forward(const at::Tensor& x);
  // Divides `output` by output features.
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;
  // Returns `tokens` of the embedding.
  std::shared_ptr<torch::nn::Module> shared_module() const override;

  TransformerOptions options;
  LayerNorm norm{nullptr};
  Linear output{nullptr};  // is null in a tied head

 private:
  Embedding tokens_{nullptr};  // is null in a head with its own weight
};
TORCH_MODULE(TransformerHead);

}  // namespace cadre
