// Multi-head self-attention whose heads can be divided among the ranks of a group: each rank
// computes some heads and their part of the output projection.
//
// One linear layer "qkv" computes query, key and value. Its output features are ordered by key and
// value head: for each of them come the query heads that use it, its key and its value, with
// head_dim features each. So a rank that has some of the key and value heads has consecutive
// features. The layer "output" maps the heads' results, in the order of the query heads, back to
// embed_dim. Parallelize "qkv" as kColwise and "output" as kRowwise, as tensor_parallel_plan()
// does.
// After set_context_parallel() the input has this rank's tokens of a sequence that is divided among
// the ranks of another group. This can be combined with parallelize_module().
//
// Threads, lifetime, errors: those of tensor_parallel_layer.h. Blocking: as the linear layers and,
// with context parallelism, as attention/context_parallel_attention.h.
// Errors: kInvalidArgument if num_key_value_heads does not divide num_heads or num_heads does not
// divide embed_dim, and in parallelize_module() if the number of ranks does not divide the number
// of key and value heads.
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
  // The number of key and value heads, each of which is used by num_heads / num_key_value_heads
  // query heads. 0 means num_heads.
  int64_t num_key_value_heads = 0;
  bool bias = true;
  bool is_causal = true;
  // Dropout on the attention weights (B, num_heads, T, T), in training mode.
  std::optional<CounterBasedDropoutOptions> dropout = {};
};

class CADRE_EXPORT SelfAttentionImpl : public torch::nn::Module,
                                       public ContextParallelLayer,
                                       public PlannedModule {
 public:
  explicit SelfAttentionImpl(const SelfAttentionOptions& options);

  // input, result: (B, T, embed_dim), or with sequence parallelism (B, T / ranks, embed_dim). With
  // context parallelism T is the number of this rank's tokens. B and T may be 0. Throws
  // kInvalidArgument for other sizes.
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

// A self-attention that is divided among the ranks at construction; each rank gets its part of rank
// 0's weights.
class CADRE_EXPORT ParallelSelfAttentionImpl : public SelfAttentionImpl {
 public:
  ParallelSelfAttentionImpl(const SelfAttentionOptions& options, const ProcessGroup& group,
                            const ParallelSelfAttentionOptions& parallel = {});
};
TORCH_MODULE(ParallelSelfAttention);

}  // namespace cadre
