// A finite number of samples, fetched by index.
//
// Threads: get() may be called from several threads at once. Blocking: get() and digest() may read
// a disk. Lifetime: a batch owns its tensors. Errors: cadre::Error. Source: map-style datasets of
// torch.utils.data; but one call fetches a whole batch. Guide: docs/guide/training/data.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>

#include "cadre/core/base/export.h"

namespace cadre {

// data: (B, ...), target: (B, ...). B is 0 if a rank's share of the batch is empty.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

class CADRE_EXPORT Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // Returns the number of samples, which does not change.
  // Returns the samples with these indices, in this order. REQUIRES: each is in [0, size()).
  virtual Batch get(std::span<const int64_t> indices) const = 0;
  // Returns a number that identifies the samples: equal for equal samples and different for others,
  // for example a hash of all bytes. A DataLoader compares it among its ranks. If it is nullopt,
  // the DataLoader compares only the sizes of the datasets.
  virtual std::optional<uint64_t> digest() const { return std::nullopt; }
};

}  // namespace cadre
