// The linear layer before attention: computes query, key and value of all heads in one product.
// Tensor parallelism divides it by heads.
//
// The features are ordered as GPT-2's: the queries of all heads, then the keys, then the values. A
// contiguous chunk of them would not consist of whole heads. So before the layer is divided,
// separate() makes query, key and value a dimension of the parameters, and ranks divide the
// dimension after it.
//
// Threads, lifetime, errors: parallel/layers/tensor_parallel_layer.h. Blocking: as a
// column-parallel cadre::Linear.
#pragma once

#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/parallel/layers/tensor_parallel_layer.h"

namespace cadre::train {

// Has the parameters of nn::Linear(width, 3 * width): weight (3 * width, width), bias (3 * width).
class QueryKeyValueImpl : public torch::nn::LinearImpl, public TensorParallelLayer {
 public:
  QueryKeyValueImpl(int64_t width, int64_t heads);

  // Maps (B, T, width), or with sequence parallelism this rank's tokens, to (3, B, heads of this
  // rank, T, width / heads).
  at::Tensor forward(const at::Tensor& input);
  // Changes the shapes of the parameters to (3, width, width) and (3, width); they stay the same
  // tensors. REQUIRES: they have no gradients, and the layer is not divided.
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

}  // namespace cadre::train
