// Layer normalization, also for activations that are shards of the sequence (kSequence).
//
// Threads, lifetime, errors: those of tensor_parallel_layer.h. Blocking: forward() does not block.
// The backward of a kSequence layer sums the gradients of weight and bias over the group, until the
// group's deadline, so that an optimizer gets the same gradients as in one process.
// Source: sequence parallelism, https://arxiv.org/abs/2205.05198.
#pragma once

#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"

namespace cadre {

class CADRE_EXPORT LayerNormImpl : public torch::nn::LayerNormImpl, public TensorParallelLayer {
 public:
  using torch::nn::LayerNormImpl::LayerNormImpl;

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  std::string options_text() const override;

 private:
  std::vector<NamedTensor> parameters_of_layer() const override;
  std::optional<int64_t> divided_dim(std::string_view, ParallelStyle) const override {
    return std::nullopt;
  }
  std::optional<std::string> problem_of(const LayerParallelism& how) const override;
};
TORCH_MODULE(LayerNorm);

}  // namespace cadre
