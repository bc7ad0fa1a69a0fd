// Describes the tensors that a stage will send to the next stage: their dtypes, their sizes, which
// of them require grad and which are on a device, as a fixed number of integers.
//
// Errors: kInvalidArgument for tensors that a header cannot describe; kCorruption for integers that
// are not a valid header. kMaxBytes limits the memory that a received header can make the receiver
// allocate.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
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
    bool is_on_device = false;
    friend bool operator==(const Entry&, const Entry&) = default;
  };

  static constexpr size_t kMaxTensors = 16;
  static constexpr size_t kMaxDims = 8;
  static constexpr int64_t kMaxBytes = int64_t{1} << 40;
  // A header has a magic number and the number of tensors, then for each tensor its dtype, flags
  // (1: it requires grad, 2: it is on a device), number of dimensions and sizes.
  static constexpr size_t kWords = 2 + kMaxTensors * (3 + kMaxDims);

  std::vector<Entry> tensors;

  static Result<TensorHeader> of(const std::vector<at::Tensor>& tensors);
  static Result<TensorHeader> decode(std::span<const int64_t> words);
  std::vector<int64_t> encode() const;

  // Returns new uninitialized tensors as described. `device`: that of the receiver, for the tensors
  // that are on a device.
  std::vector<at::Tensor> allocate(c10::Device device) const;
  // Returns a text such as "(8, 3) float32, (8) int64", for error messages.
  std::string text() const;

  friend bool operator==(const TensorHeader&, const TensorHeader&) = default;
};

}  // namespace cadre::parallel
