// A GPT: token and position embeddings, pre-norm blocks of causal attention and MLP, a final norm,
// and a head that is tied to the token embedding or has a weight of its own. The MLP of a block may
// be a mixture of experts; the weighted sum of the load-balancing losses of all routers is then
// added to the loss. The capacity of experts is limited only in training, because under a limit an
// output depends on the other tokens of the batch.
//
// A Gpt can be cut into parts, which become stages of a pipeline. Its layers can be divided by
// parallelize_module() with plan(), its sequences by set_context_parallel(), and its experts by
// ExpertParallel. Parameters keep their names in each case.
//
// Threads, errors: as torch::nn::Module. Blocking: only if the model is divided; forward and
// backward are then collective. Parameters are named after GPT-2's (wte.weight,
// h_0.attn_c_attn.weight, ...), with nn::Linear's (out, in) shapes; separate_heads() changes the
// shapes of attn_c_attn. Experts have no biases and are named after MixtureOfExperts
// (h_0.mlp_experts.router.weight, ...). Source: Radford et al., "Language Models are Unsupervised
// Multitask Learners", 2019, also for the initial values: normal with a standard deviation of 0.02,
// divided by sqrt(2 * layers) for projections into the residual stream. Dropout is applied to the
// sum of the embeddings, and to the outputs of attention and MLP before they are added to the
// residual stream. Its masks depend on the sample, not on the process that computes it
// (parallel/layers/counter_based_dropout.h).
#pragma once

#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/layer_norm.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/tp/parallelize_module.h"
#include "cadre/train/trainer/models/language_model.h"

namespace cadre::train {

// The linear layer before attention: computes query, key and value of all heads in one product. It
// has the parameters of nn::Linear(width, 3 * width): weight (3 * width, width), bias (3 * width).
// Tensor parallelism divides it by heads.
//
// The output features have GPT-2's order: the queries of all heads, then the keys, then the values.
// If ranks divided this dimension into contiguous chunks, a chunk would not consist of whole heads.
// So separate() first reshapes the parameters so that query, key and value are a dimension of its
// own; ranks then divide the dimension after it.
class QueryKeyValueImpl : public torch::nn::LinearImpl, public TensorParallelLayer {
 public:
  QueryKeyValueImpl(int64_t width, int64_t heads);

  // Maps (B, T, width) to (3, B, heads of this rank, T, width / heads). With sequence parallelism
  // the input has only this rank's tokens.
  at::Tensor forward(const at::Tensor& input);
  // Changes the shapes of the parameters to (3, width, width) and (3, width); the tensor objects
  // stay the same. REQUIRES: the parameters have no gradients, and the layer is not divided yet.
  void separate();
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

 private:
  std::vector<NamedTensor> parameters_of_layer() const override;
  std::optional<int64_t> divided_dim(std::string_view parameter,
                                     ParallelStyle style) const override;
  std::optional<std::string> problem_of(const LayerParallelism& how) const override;
  at::Tensor features(const at::Tensor& input) const;

  int64_t heads_;
};
TORCH_MODULE(QueryKeyValue);

// Computes x + attention(norm(x)), then x + mlp(norm(x)). The MLP may be a mixture of experts.
class GptBlock : public torch::nn::Module, public ContextParallelLayer {
 public:
  // `index` is the index of the block in the whole model.
  GptBlock(const ModelConfig& config, int64_t index,
           const std::shared_ptr<const DropoutStream>& stream);
  // Maps (B, T, width) to (B, T, width). The second result is the router's load-balancing loss, a
  // tensor of shape (); it is undefined if the block has no experts.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x);
  void train(bool on = true) override;
  void separate_heads() { query_key_value_->separate(); }
  bool has_experts() const { return !experts_.is_empty(); }

 private:
  std::pair<at::Tensor, at::Tensor> compute(const at::Tensor& x);
  at::Tensor attend(const at::Tensor& x);

  bool is_recomputed_;
  std::optional<double> capacity_factor_;  // the capacity in training; nullopt: no limit
  LayerNorm attention_norm_;
  QueryKeyValue query_key_value_;
  Linear attention_projection_;
  CounterBasedDropout attention_dropout_;
  LayerNorm mlp_norm_;
  MixtureOfExperts experts_{nullptr};  // null if the next two layers are used instead
  Linear mlp_expand_{nullptr};
  Linear mlp_projection_{nullptr};
  CounterBasedDropout mlp_dropout_{nullptr};
};

// Describes a part of a Gpt: consecutive layers.
struct GptPart {
  int64_t first_block = 0;
  int64_t end_block = 0;
  bool has_embeddings = false;
  bool has_head = false;
};

class Gpt : public LanguageModel, public ContextParallelLayer {
 public:
  Gpt(const ModelConfig& config, int64_t vocabulary, const at::Generator& generator);
  // Makes a part of `whole` that shares its layers and its dropout stream. A part with a tied head
  // but without embeddings gets a copy of the head's weight.
  Gpt(const Gpt& whole, const GptPart& part);

  // The input of the first part is whole sequences of tokens (B, T), also under context
  // parallelism; that of other parts is the output of the part before. The last part returns
  // logits: of this rank's tokens, and of its share of the vocabulary.
  at::Tensor forward(const at::Tensor& data) override;
  void set_rows(const SampledRows& rows) override;
  at::Tensor take_auxiliary_loss() override { return std::exchange(auxiliary_loss_, {}); }
  int64_t context() const override { return context_; }
  int64_t vocabulary() const { return vocabulary_; }
  bool is_tied() const { return is_tied_; }

  // Returns the plan of parallelize_module() for the layers of this part. `sequence` says whether
  // sequence parallelism is used.
  std::vector<PlanEntry> plan(bool sequence) const;
  // Calls QueryKeyValue::separate() in each block. Call this before parallelize_module(), which
  // divides the dimension that separate() creates.
  void separate_heads();

 private:
  void initialize(int64_t layers, const at::Generator& generator);
  at::Tensor embed(const at::Tensor& tokens);

  int64_t context_;
  int64_t vocabulary_;
  bool is_tied_;
  bool has_head_ = true;
  double auxiliary_weight_;
  at::Tensor auxiliary_loss_;
  std::shared_ptr<DropoutStream> stream_;
  Embedding token_embedding_{nullptr};
  Embedding position_embedding_{nullptr};  // null in a part without embeddings
  CounterBasedDropout embedding_dropout_{nullptr};
  std::vector<std::shared_ptr<ShardUnit<GptBlock>>> blocks_;
  LayerNorm final_norm_{nullptr};
  Linear head_{nullptr};  // null if the head is tied, and in a part without a head
};

}  // namespace cadre::train
