#include "cadre/train/data/synthetic_dataset.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/tensor_samples.h"

namespace cadre {
namespace {

Batch rows_of(const at::Tensor& data, const at::Tensor& target, std::span<const int64_t> indices) {
  const at::Tensor rows = at::tensor(at::IntArrayRef(indices.data(), indices.size()), at::kLong);
  return {.data = data.index_select(0, rows), .target = target.index_select(0, rows)};
}

}  // namespace

SyntheticRegression::SyntheticRegression(const SyntheticRegressionOptions& options) {
  if (options.num_samples < 0 || options.num_inputs < 1 || options.num_outputs < 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("SyntheticRegression: {} samples of {} inputs and {} outputs; expected "
                      "no negative number of samples, and at least 1 input and 1 output",
                      options.num_samples, options.num_inputs, options.num_outputs));
  }
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed));
  const at::Tensor weight = at::randn({options.num_inputs, options.num_outputs}, generator);
  data_ = at::randn({options.num_samples, options.num_inputs}, generator);
  target_ = at::tanh(at::mm(data_, weight));
}

Batch SyntheticRegression::get(std::span<const int64_t> indices) const {
  return rows_of(data_, target_, indices);
}

std::optional<uint64_t> SyntheticRegression::digest() const {
  return digest_of({data_, target_});
}

SyntheticImages::SyntheticImages(const SyntheticImagesOptions& options) {
  if (options.num_samples < 0 || options.num_classes < 1 || options.size < 1) {
    throw Error(ErrorCode::kInvalidArgument,
                cadre::format("SyntheticImages: {} samples of {} classes and {} pixels a side; "
                              "expected no negative number of samples, and at least 1 class and 1 "
                              "pixel",
                              options.num_samples, options.num_classes, options.size));
  }
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(options.seed));
  const at::Tensor pictures =
      at::randn({options.num_classes, 1, options.size, options.size}, generator);
  target_ = at::randint(options.num_classes, {options.num_samples}, generator,
                        at::TensorOptions(at::kLong));
  data_ = at::randn({options.num_samples, 1, options.size, options.size}, generator);
  data_.add_(pictures.index_select(0, target_));
}

Batch SyntheticImages::get(std::span<const int64_t> indices) const {
  return rows_of(data_, target_, indices);
}

std::optional<uint64_t> SyntheticImages::digest() const {
  return digest_of({data_, target_});
}

SyntheticImages SyntheticImages::slice(int64_t begin, int64_t end) const {
  check_slice("SyntheticImages", begin, end, size());
  SyntheticImages part = *this;
  part.data_ = data_.narrow(0, begin, end - begin);
  part.target_ = target_.narrow(0, begin, end - begin);
  return part;
}

}  // namespace cadre
