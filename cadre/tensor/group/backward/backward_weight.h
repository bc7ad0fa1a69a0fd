// The weight by which a data-parallel wrapper multiplies this rank's gradients after the running
// backward. A backward that itself adds gradients of several ranks, as that of a synchronous batch
// normalization does, multiplies by it what it adds, so that the sum is that of the weighted
// losses.
//
// Threads: each thread has its own weights; a BackwardWeight is valid in the thread that made it,
// and may be destroyed in any thread. Blocking: never. Errors: std::bad_alloc.
#pragma once

#include <memory>
#include <optional>

#include "cadre/core/base/export.h"

namespace cadre {

// Sets the weight of the backwards that this thread runs while the object exists, including nested
// ones.
class BackwardWeight {
 public:
  // weight: only the ratios between the ranks' weights matter, for example their numbers of
  // samples.
  explicit BackwardWeight(double weight);

 private:
  std::shared_ptr<const double> weight_;
};

// Returns the weight that was set last and still exists; nullopt if there is none, so that all
// ranks have equal weights or the weights are not known.
CADRE_EXPORT std::optional<double> backward_weight();

}  // namespace cadre
