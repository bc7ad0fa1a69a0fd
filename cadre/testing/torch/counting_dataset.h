// A dataset for the tests of DataLoader.
//
// For tests only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <cstdint>
#include <span>

#include "cadre/train/data/dataset.h"

namespace cadre::testing {

// A dataset in which each sample is its own index.
class Counting : public Dataset {
 public:
  explicit Counting(int64_t num_samples) : num_samples_(num_samples) {}
  int64_t size() const override { return num_samples_; }
  Batch get(std::span<const int64_t> indices) const override {
    const at::Tensor rows = at::tensor(at::IntArrayRef(indices.data(), indices.size()), at::kLong);
    return {.data = rows, .target = rows};
  }

 private:
  int64_t num_samples_;
};

}  // namespace cadre::testing
