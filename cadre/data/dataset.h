// What can be learned from: a finite number of samples, fetched by index.
//
// Threads: get() may be called from several threads at once. Blocking: as the data needs (a disk).
// Lifetime: a batch owns its tensors. Errors: cadre::Error.
// Source: torch.utils.data.Dataset, of the map kind, but fetched by the batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "cadre/base/export.h"

namespace cadre {

// data: (B, ...), target: (B, ...); B is 0 where a rank has no share of a batch.
struct Batch {
  at::Tensor data;
  at::Tensor target;
};

class CADRE_EXPORT Dataset {
 public:
  virtual ~Dataset() = default;
  virtual int64_t size() const = 0;  // samples
  // The samples of these indices, in their order. REQUIRES: each in [0, size()).
  virtual Batch get(std::span<const int64_t> indices) const = 0;
};

}  // namespace cadre
