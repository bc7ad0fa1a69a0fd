#include "cadre/data/synthetic_dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>

namespace cadre {

SyntheticRegression::SyntheticRegression(const SyntheticRegressionOptions& options) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed));
  const at::Tensor weight = at::randn({options.num_inputs, options.num_outputs}, generator);
  data_ = at::randn({options.num_samples, options.num_inputs}, generator);
  target_ = at::tanh(at::mm(data_, weight));
}

Batch SyntheticRegression::get(std::span<const int64_t> indices) const {
  const at::Tensor rows = at::tensor(at::IntArrayRef(indices.data(), indices.size()), at::kLong);
  return {.data = data_.index_select(0, rows), .target = target_.index_select(0, rows)};
}

}  // namespace cadre
