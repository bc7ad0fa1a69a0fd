// The order in which an epoch visits the samples of a dataset, as a function of the position.
//
// A position counts the samples of all ranks together, so an order does not depend on the number of
// ranks: a DataLoader divides each batch of positions among its ranks, and a run that continues on
// another number of ranks visits exactly the positions that are left.
//
// Threads: all methods are const, and an EpochOrder may be called from several threads at once.
// Blocking: order() may compute the whole epoch. Lifetime: an EpochOrder owns what it needs.
// Errors: kInvalidArgument. Source: torch.utils.data.Sampler; but by position, which makes a
// resumption exact. Guide: docs/guide/training/data.md.
#pragma once

#include <cstdint>
#include <functional>

#include "cadre/core/base/export.h"

namespace cadre {

// Returns the index of the sample at a position of the epoch.
using EpochOrder = std::function<int64_t(int64_t position)>;

class CADRE_EXPORT Sampler {
 public:
  virtual ~Sampler() = default;
  virtual int64_t size() const = 0;  // Returns the number of positions of each epoch.
  virtual EpochOrder order(int64_t epoch) const = 0;
  // Returns a number that is equal for samplers with equal orders and different for others. A
  // DataLoader compares it among its ranks.
  virtual uint64_t digest() const = 0;
};

}  // namespace cadre
