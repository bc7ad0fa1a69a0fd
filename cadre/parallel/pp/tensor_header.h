// Describes the tensors that a stage will send to the next one: dtypes, sizes and which of them
// require a gradient, as a fixed count of numbers.
//
// Threads: plain values and pure functions. Blocking: never. Lifetime: owns its parts.
// Errors: kInvalidArgument for tensors that a header cannot describe; kCorruption for numbers that
// describe no tensors. What a header may ask a receiver to allocate is bounded by kMaxBytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre::parallel {

struct TensorHeader {
  struct Entry {
    at::ScalarType dtype;
    bool requires_grad;
    std::vector<int64_t> sizes;
    friend bool operator==(const Entry&, const Entry&) = default;
  };

  static constexpr size_t kMaxTensors = 16;
  static constexpr size_t kMaxDims = 8;
  static constexpr int64_t kMaxBytes = int64_t{1} << 40;
  // Magic number and number of tensors; then dtype, requires_grad, dim and sizes of each tensor.
  static constexpr size_t kWords = 2 + kMaxTensors * (3 + kMaxDims);

  std::vector<Entry> tensors;

  static Result<TensorHeader> of(const std::vector<at::Tensor>& tensors);
  static Result<TensorHeader> decode(std::span<const int64_t> words);
  std::vector<int64_t> encode() const;

  // Returns new tensors, not initialized.
  std::vector<at::Tensor> allocate() const;
  // Returns "(8, 3) float32, (8) int64", for error messages.
  std::string text() const;

  friend bool operator==(const TensorHeader&, const TensorHeader&) = default;
};

}  // namespace cadre::parallel
