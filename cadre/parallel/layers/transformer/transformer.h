// The layers of a GPT-2 transformer: embeddings of tokens and positions, pre-norm blocks of
// attention and MLP, and a head with a final norm. They can be used in a torch::nn::Sequential or
// in modules of the program.
//
// The layers support all forms of parallelism: parallelize_module() with tensor_parallel_plan()
// divides their matrices, set_context_parallel() divides sequences, a
// ShardUnit<TransformerBlockImpl> shards the parameters of a block, and pipeline_of() divides a
// Sequential of them into stages.
//
// Initial values are those of GPT-2: normal with a standard deviation of 0.02, divided by sqrt(2 *
// num_blocks) for the projections whose outputs are added to the residual stream; biases are 0.
//
// Threads, lifetime: those of tensor_parallel_layer.h. Blocking: only if they are divided, as their
// layers. Errors: cadre::Error, kInvalidArgument for invalid options or inputs.
// There is no dropout; a model with dropout needs blocks of its own with CounterBasedDropout.
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

// The sizes of a model. All layers of the model get the same options. Numbers are at least 1.
struct TransformerOptions {
  int64_t vocabulary;
  int64_t context;  // the largest number of tokens in a sequence
  int64_t embed_dim;
  int64_t num_heads;   // divides embed_dim
  int64_t num_blocks;  // the number of blocks in the whole model
  // The number of heads of keys and values, which divides num_heads; 0 means num_heads.
  int64_t num_key_value_heads = 0;
  // The number of features between the two layers of the MLP; 0 means 4 * embed_dim.
  int64_t mlp_dim = 0;
  // If true, a block saves only its input, and its backward computes the activations again
  // (tensor/hooks/activations/activation_checkpoint.h).
  bool recompute = false;
};

class CADRE_EXPORT TransformerEmbeddingImpl : public torch::nn::Module,
                                              public ContextParallelLayer,
                                              public PlannedModule {
 public:
  explicit TransformerEmbeddingImpl(const TransformerOptions& options);

  // indices: (B, T), int64 or int32, 1 <= T <= context. Every rank passes whole sequences, even
  // with context or sequence parallelism. Result: (B, T, embed_dim), where T is the number of this
  // rank's tokens.
  at::Tensor forward(const at::Tensor& indices);
  bool takes_whole_sequences() const override { return true; }
  // The plan divides the layer `tokens` by rows, that is, by the vocabulary.
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;

  TransformerOptions options;
  Embedding tokens{nullptr}, positions{nullptr};
};
TORCH_MODULE(TransformerEmbedding);

// Computes h = x + attention(norm_1(x)), then h + down(gelu(up(norm_2(h)))). gelu is the exact
// function, as torch::nn::GELU; GPT-2 itself uses the approximation by tanh.
class CADRE_EXPORT TransformerBlockImpl : public torch::nn::Module, public PlannedModule {
 public:
  explicit TransformerBlockImpl(const TransformerOptions& options);

  // x, result: (B, T, embed_dim), where T is the number of this rank's tokens.
  at::Tensor forward(const at::Tensor& x);
  // The plan divides `up` by output features and `down` by input features. The attention has its
  // own plan.
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;

  TransformerOptions options;
  LayerNorm norm_1{nullptr}, norm_2{nullptr};
  SelfAttention attention{nullptr};
  Linear up{nullptr}, down{nullptr};

 private:
  at::Tensor compute(const at::Tensor& x);
};
TORCH_MODULE(TransformerBlock);

// Computes the logits: a norm, then a product with the transposed table of a TransformerEmbedding
// (a tied head) or with its own weight, "output". A tied head does not register the table, so
// parameters() of a model lists the table once, as a parameter of the embedding.
class CADRE_EXPORT TransformerHeadImpl : public torch::nn::Module,
                                         public PlannedModule,
                                         public SharingModule {
 public:
  explicit TransformerHeadImpl(const TransformerOptions& options);
  // Makes a head that is tied to the table of `embedding`.
  explicit TransformerHeadImpl(const TransformerEmbedding& embedding);

  // x: (B, T, embed_dim), where T is the number of this rank's tokens. Result: (B, T, vocabulary).
  // With tensor parallelism the result has this rank's part of the vocabulary, for the whole
  // sequence, as vocab_parallel_cross_entropy() takes it; the whole vocabulary if the plan was made
  // with whole_logits.
  at::Tensor forward(const at::Tensor& x);
  // The plan divides `output` by output features, that is, by the vocabulary.
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;
  // Returns the layer `tokens` of the embedding, whose table the head uses.
  std::shared_ptr<torch::nn::Module> shared_module() const override;

  TransformerOptions options;
  LayerNorm norm{nullptr};
  Linear output{nullptr};  // null in a tied head

 private:
  Embedding tokens_{nullptr};  // null in a head with its own weight
};
TORCH_MODULE(TransformerHead);

}  // namespace cadre
