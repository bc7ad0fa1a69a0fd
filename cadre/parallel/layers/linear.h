// A linear layer that can be divided among the ranks of a group: by output features (kColwise), by
// input features (kRowwise), or not, with inputs that are shards of the sequence (kSequence).
//
// Threads, lifetime, errors: those of tensor_parallel_layer.h. Blocking: the forward() of a divided
// layer, and its backward, communicate until the group's deadline; the constructors with a group
// are collective. If the number of features is not divisible by the ranks, they are divided by the
// rule of Shard (tensor/mesh/placement.h).
// Source: Megatron-LM, https://arxiv.org/abs/1909.08053.
#pragma once

#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"

namespace cadre {

class CADRE_EXPORT LinearImpl : public torch::nn::LinearImpl, public TensorParallelLayer {
 public:
  using torch::nn::LinearImpl::LinearImpl;

  // input: (..., in_features), or this rank's part of it, depending on the style. Result: (...,
  // out_features), or this rank's part of it.
  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // Divides the features in multiples of `size` instead of single features, for example in whole
  // attention heads. The number of blocks of this size must be divisible by the number of ranks.
  // Throws kInvalidArgument for a size below 1.
  void set_block_size(int64_t size);
  // Returns the index of this rank's first feature in the divided dimension; 0 if no features are
  // divided.
  int64_t first_divided_feature() const;
  std::string options_text() const override;

 private:
  std::vector<NamedTensor> parameters_of_layer() const override;
  std::optional<int64_t> divided_dim(std::string_view parameter,
                                     ParallelStyle style) const override;
  std::optional<std::string> problem_of(const LayerParallelism& how) const override;
  at::Tensor column_parallel(const at::Tensor& input, const LayerParallelism& how) const;
  at::Tensor row_parallel(const at::Tensor& input, const LayerParallelism& how) const;

  int64_t block_size_ = 1;
};
TORCH_MODULE(Linear);

struct ColumnParallelOptions {
  bool gather_output = false;
  bool sequence_parallel = false;
};

// A linear layer that is divided among the ranks at construction. Each rank draws the whole
// weights, as torch::nn::Linear does, and then takes its part of rank 0's weights.
class CADRE_EXPORT ColumnParallelLinearImpl : public LinearImpl {
 public:
  ColumnParallelLinearImpl(const torch::nn::LinearOptions& options, const ProcessGroup& group,
                           const ColumnParallelOptions& parallel = {});
};
TORCH_MODULE(ColumnParallelLinear);

struct RowParallelOptions {
  bool input_is_parallel = true;
  bool sequence_parallel = false;
};

class CADRE_EXPORT RowParallelLinearImpl : public LinearImpl {
 public:
  RowParallelLinearImpl(const torch::nn::LinearOptions& options, const ProcessGroup& group,
                        const RowParallelOptions& parallel = {});
};
TORCH_MODULE(RowParallelLinear);

}  // namespace cadre
