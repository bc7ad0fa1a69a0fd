// Generated samples, for tests and examples that need no files.
//
// Threads: any. Blocking: never. Errors: kInvalidArgument for sizes out of range.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cadre/core/base/export.h"
#include "cadre/train/data/dataset.h"

namespace cadre {

struct SyntheticRegressionOptions {
  int64_t num_samples = 1024;
  int64_t num_inputs = 8;
  int64_t num_outputs = 1;
  int64_t seed = 0;
};

// data: (B, num_inputs) float32, normal; target: (B, num_outputs) float32 = tanh(data W), with one
// fixed W drawn from the seed. Sample i depends only on (seed, i).
class CADRE_EXPORT SyntheticRegression : public Dataset {
 public:
  explicit SyntheticRegression(const SyntheticRegressionOptions& options);

  int64_t size() const override { return data_.size(0); }
  Batch get(std::span<const int64_t> indices) const override;
  std::optional<uint64_t> digest() const override;

 private:
  at::Tensor data_;
  at::Tensor target_;
};

struct SyntheticImagesOptions {
  int64_t num_samples = 1024;
  int64_t num_classes = 10;
  int64_t size = 28;  // the number of pixels of each side
  int64_t seed = 0;
};

// data: (B, 1, size, size) float32; target: (B) int64. Each class has one image of normal noise; a
// sample is the image of its class plus independent normal noise of the same variance.
class CADRE_EXPORT SyntheticImages : public Dataset {
 public:
  explicit SyntheticImages(const SyntheticImagesOptions& options);

  int64_t size() const override { return target_.size(0); }
  Batch get(std::span<const int64_t> indices) const override;
  std::optional<uint64_t> digest() const override;
  // Returns samples [begin, end). Throws kInvalidArgument unless they are within [0, size()].
  SyntheticImages slice(int64_t begin, int64_t end) const;

 private:
  at::Tensor data_;
  at::Tensor target_;
};

}  // namespace cadre
