// An embedding whose vocabulary can be divided among the ranks of a group (kRowwise), or whose
// outputs are shards of the sequence (kSequence), such as an embedding of positions.
//
// Threads, lifetime, errors: those of tensor_parallel_layer.h. Blocking: the forward() of a divided
// layer, and its backward, communicate until the group's deadline; a constructor with a group is
// collective.
// Errors: also kInvalidArgument, on all ranks, for an index outside of the vocabulary (on a device
// the failure of a kernel, which the next wait for the device throws), and for options that a
// divided table does not support: max_norm, scale_grad_by_freq, sparse.
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

  // indices: (..., T), integers, the same on every rank. Result: (..., T, D), whole on every rank.
  // With sequence parallelism, and in the style kSequence, it is this rank's shard (..., T / ranks,
  // D).
  at::Tensor forward(const at::Tensor& indices);
  // Computes the logits of an output head that is tied to the table: hidden * table^T. hidden:
  // (..., D), or with sequence parallelism this rank's shard. Result: (..., V); in the style
  // kRowwise without gather_output only this rank's part of V, the input of
  // vocab_parallel_cross_entropy().
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

// An embedding that is divided among the ranks at construction. Each rank draws the whole table, as
// torch::nn::Embedding does, and then takes its part of rank 0's table.
class CADRE_EXPORT VocabParallelEmbeddingImpl : public EmbeddingImpl {
 public:
  VocabParallelEmbeddingImpl(const torch::nn::EmbeddingOptions& options, const ProcessGroup& group,
                             const VocabParallelOptions& parallel = {});
};
TORCH_MODULE(VocabParallelEmbedding);

}  // namespace cadre
