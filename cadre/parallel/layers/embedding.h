// An embedding whose vocabulary can be divided among the ranks of a group (kRowwise), or whose
// outputs are shards of the sequence (kSequence), such as an embedding of positions.
//
// Threads, lifetime, errors: tensor_parallel_layer.h. Blocking: forward() of a divided layer, and
// its backward, communicate until the group's deadline; the constructor with a group is collective.
// Errors: kInvalidArgument, on all ranks alike, also for an index outside of the vocabulary, and
// for options that a divided table does not have: max_norm, scale_grad_by_freq, sparse.
// Source: Megatron-LM, https://arxiv.org/abs/1909.08053.
#pragma once

#include <torch/nn/modules/embedding.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"

namespace cadre {

class CADRE_EXPORT EmbeddingImpl : public torch::nn::EmbeddingImpl, public TensorParallelLayer {
 public:
  using torch::nn::EmbeddingImpl::EmbeddingImpl;

  // indices: (..., T), integers, the same on every rank; result: (..., T, D), whole on every rank;
  // with sequence parallelism, and for kSequence, this rank's shard (..., T / ranks, D).
  at::Tensor forward(const at::Tensor& indices);
  // Returns the logits of a head that is tied to the table: hidden times the transposed table.
  // hidden: (..., D), or with sequence parallelism a shard; result: (..., V), or for kRowwise this
  // rank's part of V, which vocab_parallel_cross_entropy() takes.
  at::Tensor logits(const at::Tensor& hidden) const;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  std::string options_text() const override;

 private:
  std::vector<NamedTensor> parameters_of_layer() const override { return {{"weight", weight}}; }
  std::optional<int64_t> divided_dim(std::string_view parameter,
                                     ParallelStyle style) const override;
  std::optional<std::string> problem_of(const LayerParallelism& how) const override;
  at::Tensor rows_of(const at::Tensor& indices, const LayerParallelism& how) const;
};
TORCH_MODULE(Embedding);

struct VocabParallelOptions {
  bool sequence_parallel = false;
};

// An embedding that is divided from the start. Each rank draws the whole table as
// torch::nn::Embedding does, and takes its part from the table of rank 0.
class CADRE_EXPORT VocabParallelEmbeddingImpl : public EmbeddingImpl {
 public:
  VocabParallelEmbeddingImpl(const torch::nn::EmbeddingOptions& options, const ProcessGroup& group,
                             const VocabParallelOptions& parallel = {});
};
TORCH_MODULE(VocabParallelEmbedding);

}  // namespace cadre
