// Self-attention over heads, which ranks of a group divide: each computes some heads and their part
// of the output projection.
//
// Query, key and value come from one linear layer "qkv" whose output features are ordered by key
// and value head: for each of them the query heads that use it, its key, its value, head_dim
// features each. So ranks that divide the key and value heads divide the features in order.
// "output" maps the heads' results, in the order of the query heads, back to embed_dim.
// Parallelize "qkv" as kColwise and "output" as kRowwise, as tensor_parallel_plan() does.
// After set_context_parallel() the input has this rank's tokens of a sequence that the ranks of
// another group share, which composes with parallelize_module().
//
// Threads, lifetime, errors: tensor_parallel_layer.h. Blocking: as its linear layers and,
// with context parallelism, attention/context_parallel_attention.h.
// Errors: kInvalidArgument for numbers of heads that do not divide each other, embed_dim, or, when
// it is parallelized, by the number of ranks.
// Source: Megatron-LM, https://arxiv.org/abs/1909.08053; grouped queries,
// https://arxiv.org/abs/2305.13245.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"

namespace cadre {

struct SelfAttentionOptions {
  int64_t embed_dim;
  int64_t num_heads;
  // The number of key and value heads. Each serves num_heads / num_key_value_heads query heads; 0
  // means num_heads.
  int64_t num_key_value_heads = 0;
  bool bias = true;
  bool is_causal = true;
  // Dropout on the attention weights (B, num_heads, T, T), in training.
  std::optional<CounterBasedDropoutOptions> dropout = {};
};

class CADRE_EXPORT SelfAttentionImpl : public torch::nn::Module,
                                       public ContextParallelLayer,
                                       public PlannedModule {
 public:
  explicit SelfAttentionImpl(const SelfAttentionOptions& options);

  // input, result: (B, T, embed_dim), or with sequence parallelism (B, T / ranks, embed_dim).
  // With context parallelism T counts this rank's tokens. B and T may be 0. Throws kInvalidArgument
  // for other sizes.
  at::Tensor forward(const at::Tensor& input);
  std::string options_text() const override;
  std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const override;

  SelfAttentionOptions options;
  Linear qkv{nullptr}, output{nullptr};

 private:
  at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) const;
};
TORCH_MODULE(SelfAttention);

struct ParallelSelfAttentionOptions {
  bool sequence_parallel = false;
};

// A self-attention that is divided from the start, into parts of rank 0's weights.
class CADRE_EXPORT ParallelSelfAttentionImpl : public SelfAttentionImpl {
 public:
  ParallelSelfAttentionImpl(const SelfAttentionOptions& options, const ProcessGroup& group,
                            const ParallelSelfAttentionOptions& parallel = {});
};
TORCH_MODULE(ParallelSelfAttention);

}  // namespace cadre
